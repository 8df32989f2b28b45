"""Builds any module without memory for its parameters, to be filled from files: with its buffers, which are computed.

On the meta device alone what a constructor computes would be lost; here only parameters go there, each as soon as it
is registered. Some constructors do more than that allows: for those there is no such module, and the caller builds
it in full.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.models.pretrained import DrawNothing, place

M = TypeVar("M", bound=nn.Module)


def build_empty(make: Callable[[], M]) -> M | None:
    """Returns `make()` with its parameters on the meta device and its buffers as they are; None where that fails.

    It fails where the constructor reads a parameter's values, keeps one where the module does not show it, or draws
    numbers for computed buffers: drawn after weights that were not, they would be others. Then the generators are as
    they were before. (Python's and numpy's numbers are the same either way: no weight's own drawing asks them.)
    """
    generators = Generators()
    with _weights_on_meta() as made, DrawNothing() as draws:
        try:
            model = make()
        except Exception:  # what is wrong beside the meta device, the full build will say
            generators.restore()
            return None
    if _keeps_meta_tensors(model, made) or (draws.has_drawn and _has_computed(model)):
        generators.restore()
        return None
    return model


def allocate(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Gives the parameters that are on the meta device memory, whose values are arbitrary, of these dtypes."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        parameter = model.get_parameter(shared[0])
        dtype = next((dtypes[name] for name in shared if name in dtypes), parameter.dtype)
        # Memory that nobody has touched is none yet: pages come as the values do.
        place(model, tuple(shared), torch.empty(parameter.shape, dtype=dtype))


class Generators:
    """The states of the global generators at one moment: torch's (on the CPU), Python's and numpy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Puts the states back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def _weights_on_meta() -> Iterator[list[weakref.ref[Tensor]]]:
    """Moves each parameter to the meta device as it is registered; yields references to those that it made."""
    made: list[weakref.ref[Tensor]] = []
    twins: Any = WeakIdKeyDictionary()

    def to_meta(_module: nn.Module, _name: str, parameter: Any) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta:
            return None
        if parameter not in twins:  # one that is registered at two places stays one
            empty = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            empty.__dict__ = parameter.__dict__  # a constructor may set `no_weight_decay` on the one that it holds
            twins[parameter] = empty
            made.append(weakref.ref(empty))
        return twins[parameter]

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield made
    finally:
        handle.remove()


def _keeps_meta_tensors(model: nn.Module, made: list[weakref.ref[Tensor]]) -> bool:
    """Is a tensor without values in a place that loading weights does not fill?"""
    shown = {id(parameter) for parameter in model.parameters()}

    def is_hidden(reference: weakref.ref[Tensor]) -> bool:
        parameter = reference()
        return parameter is not None and id(parameter) not in shown

    if any(buffer.is_meta for buffer in model.buffers()):
        return True
    computed = (value for module in model.modules() for value in vars(module).values())
    if any(isinstance(value, Tensor) and value.is_meta for value in computed):
        return True
    if not any(map(is_hidden, made)):
        return False
    gc.collect()  # modules that were replaced meanwhile may wait for it
    return any(map(is_hidden, made))


def _has_computed(model: nn.Module) -> bool:
    """Does the model hold tensors that are neither parameters nor in its state?"""
    if set(dict(model.named_buffers())) - set(model.state_dict(keep_vars=True)):
        return True
    return any(isinstance(value, Tensor) for module in model.modules() for value in vars(module).values())
