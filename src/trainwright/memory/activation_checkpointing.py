"""Activation checkpointing: layers keep their inputs and run again in the backward pass.

Includes the operations whose results are kept (`save`), and the measurement of saved memory for `budget: auto`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.backends.private_torch import arguments_of, tree_leaves
from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError
from trainwright.memory.module_paths import (
    Around,
    Forward,
    by_path,
    forwards_put_back,
    layers_of,
    parts_of,
    put_around,
    read_layers,
    read_names,
    reject_overlap,
)
from trainwright.parallel.mesh import local

logger = logging.getLogger(__name__)

ATTENTION = "scaled_dot_product_attention"
_KERNELS = tuple(
    f"aten::_scaled_dot_product_{kernel}"
    for kernel in (
        *("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"),
        "fused_attention_overrideable",
    )
)
"""The operations of attention, by device and shape."""
_PROBABILITIES = ("dropout_p", "p")


def read_operations(label: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the operations with their namespaces; rejects unknown ones and those whose results cannot be kept."""
    found: list[str] = []
    for name in names:
        full = name if "::" in name else f"aten::{name}"
        if name == ATTENTION:
            found += _KERNELS
            continue
        namespace, _, base = full.partition("::")
        packet: Any = getattr(getattr(torch.ops, namespace), base, None)
        overloads = [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []
        if not overloads:
            near = nearest(name, [ATTENTION, *dir(torch)])
            guess = f' Did you mean "{near}"?' if near else ""
            raise ConfigError(f'{label}: torch has no operation "{name}".{guess} Use mm, addmm, {ATTENTION} or others.')
        # Autograd sees other operations in its place; torch has no public function for this.
        if any(
            torch._C._dispatch_has_kernel_for_dispatch_key(each.name(), "CompositeImplicitAutograd")
            for each in overloads
        ):
            raise ConfigError(
                f'{label}: "{name}" is decomposed into other operations. Use those, such as mm, '
                f"addmm (a linear layer with bias), bmm, {ATTENTION}."
            )
        is_random = any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)
        if is_random and not any(argument.name == "dropout_p" for each in overloads for argument in arguments_of(each)):
            raise ConfigError(
                f'{label}: "{name}" draws random numbers, so later draws would differ in the recomputation. Remove it.'
            )
        found.append(full)
        if full in ("aten::mm", "aten::addmm"):
            found.append("aten::_scaled_mm")  # the same product of a layer that trains in fp8
    return tuple(found)


class Policy:
    """Decides for each operation of a layer whether its result is kept; torch calls it in both passes."""

    def __init__(self, operations: Sequence[str]) -> None:
        self._operations = frozenset(operations)

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keeps the configured operations, except those that draw random numbers: later draws must repeat."""
        name = operation.name().partition(".")[0]
        if name in self._operations and not _draws(operation, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Returns True if this call uses random numbers; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for position, argument in enumerate(arguments_of(operation)):
        if argument.name in _PROBABILITIES:
            default = args[position] if position < len(args) else argument.default_value
            return bool(kwargs.get(argument.name, default))
    return True


LABEL = "activation_checkpointing"
KEYS = ("layers", "save", "budget", "every")
AUTO = "auto"
"""The budget is measured before a run; until then all layers are recomputed, which needs the least memory."""


@dataclass(frozen=True)
class LayerCheckpointing:
    """Which layers of a model or submodule are recomputed."""

    layers: tuple[str, ...]
    """Class names, or globs over module names."""
    save: tuple[str, ...] = ()
    """Operations (aten names) whose results a recomputed layer keeps."""
    budget: float = 0.0
    """The share of the layers' activations that may be kept; with 1 no layer is recomputed."""
    every: int = 1
    """Every n-th layer is recomputed, starting with the first."""


def recompute_layers(model: nn.Module, given: Any, *, is_whole: bool = True) -> list[str]:
    """Makes the layers of a setting recompute, in place; returns their names, in the model's order."""
    chosen = choose_layers(model, given, is_whole=is_whole)
    _wrap(chosen)
    return list(chosen)


@contextmanager
def recomputed_within(model: nn.Module, given: Any) -> Iterator[None]:
    """Makes the layers of a setting recompute inside, without logging."""
    chosen = choose_layers(model, given, logs=False)
    with forwards_put_back(layer for layer, _ in chosen.values()):
        _wrap(chosen)
        yield


def _wrap(chosen: Mapping[str, tuple[nn.Module, LayerCheckpointing]]) -> None:
    # One object for all layers with the same setting: compiled blocks (repeated_blocks.py) share a graph only then.
    contexts = {
        setting.save: partial(create_selective_checkpoint_contexts, Policy(setting.save))
        for _, setting in chosen.values()
        if setting.save
    }
    for layer, setting in chosen.values():
        put_around(layer, partial(Recomputed, contexts=contexts.get(setting.save)))


def choose_layers(
    model: nn.Module, given: Any, *, is_whole: bool = True, logs: bool = True
) -> dict[str, tuple[nn.Module, LayerCheckpointing]]:
    """Returns the layers to recompute with their settings, by name, without a change; rejects unmatched names."""
    chosen: dict[str, tuple[nn.Module, LayerCheckpointing]] = {}
    for path, own in by_path(LABEL, given, KEYS).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        setting = read_activation_checkpointing(label, own)
        for submodule in parts_of(label, model, path, is_whole=is_whole):
            named = layers_of(label, model, submodule, setting.layers, is_whole=is_whole)
            picked = _pick(named, setting)
            if logs:
                _log_counts(label, named, picked)
            for name in picked:
                reject_overlap(label, name, chosen, change="recomputed")
                chosen[name] = (named[name], setting)
    return chosen


def read_activation_checkpointing(label: str, given: Any) -> LayerCheckpointing:
    """Reads one setting: a name, a list of names, or a mapping with `layers`."""
    layers, settings = read_layers(label, given, KEYS, example=f"{{layers: …}} with {', '.join(KEYS[1:])}")
    if "budget" in settings and "every" in settings:
        raise ConfigError(f"{label}: budget and every both set how many layers are recomputed. Use one of them.")
    budget, every = settings.get("budget", 0.0), settings.get("every", 1)
    if budget == AUTO:
        budget = 0.0
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ConfigError(f"{label}.budget: must be a number from 0 to 1, or auto; got {describe(budget)}.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"{label}.every: must be an integer of at least 1; got {describe(every)}.")
    operations = read_names(f"{label}.save", settings["save"]) if "save" in settings else ()
    return LayerCheckpointing(layers, read_operations(f"{label}.save", operations), float(budget), every)


class Recomputed(Around):
    """A forward that keeps its inputs and the results that the policy selects; the rest is computed twice."""

    def __init__(self, forward: Forward, contexts: Callable[[], Any] | None = None) -> None:
        """`contexts` returns the context managers of the first pass and of the recomputation."""
        super().__init__(forward)
        # No key if there are no contexts, because torch.compile does not support torch's own default.
        self._contexts: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; without gradients nothing is recomputed."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # torch only uses positional tensors: for the device whose random numbers must repeat, and as inputs that are
        # saved through hooks (offload.py).
        names = tuple(kwargs)
        return checkpoint(self._run, names, *args, *kwargs.values(), use_reentrant=False, **self._contexts)

    def _run(self, names: tuple[str, ...], *values: Any) -> Any:
        num_positional = len(values) - len(names)
        return self.inner(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))


def _pick(named: Mapping[str, nn.Module], setting: LayerCheckpointing) -> list[str]:
    """Returns the names of the layers to recompute.

    With a budget, each kind of layer (of one class, with equal weights) keeps its share of layers, because equal layers
    save the same amount. The last ones are kept, because their backward runs first and their memory is free before the
    first recomputation.
    """
    if setting.every > 1:
        return [name for number, name in enumerate(named) if number % setting.every == 0]
    kinds: dict[Any, list[str]] = {}
    for name, layer in named.items():
        kinds.setdefault(kind_of(layer), []).append(name)
    # 1/49 times 49 is slightly less than 1.
    kept = {
        name
        for names in kinds.values()
        for name in names[len(names) - math.floor(setting.budget * len(names) + 1e-9) :]
    }
    return [name for name in named if name not in kept]


def kind_of(layer: nn.Module) -> Any:
    """Returns a key that is equal for layers of one class with weights of the same shapes."""
    shapes = tuple((name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters())
    return type(layer), shapes


def _log_counts(label: str, named: Mapping[str, nn.Module], picked: Iterable[str]) -> None:
    counts = Counter(type(layer).__name__ for layer in named.values())
    recomputed = Counter(type(named[name]).__name__ for name in picked)
    for kind, count in counts.items():
        logger.info("model.%s: %d of %d %s are recomputed in the backward pass.", label, recomputed[kind], count, kind)


_GRAIN = 10_000  # shares have four digits in a run's settings


def has_auto(given: Any) -> bool:
    """Returns True if a setting of `model.activation_checkpointing`, or one of its paths, has `budget: auto`."""
    if not isinstance(given, Mapping):
        return False
    budget = given.get("budget")
    return (isinstance(budget, str) and budget == AUTO) or any(map(has_auto, given.values()))


def with_budget(given: Any, share: float) -> Any:
    """Returns the setting with every `auto` replaced by a share."""
    if not isinstance(given, Mapping):
        return given
    return {
        key: share if key == "budget" and value == AUTO else with_budget(value, share) for key, value in given.items()
    }


def only_auto(given: Any) -> Any:
    """Returns the part of the setting with `budget: auto`; None if there is none."""
    return _select(given, wants_auto=True)


def without_auto(given: Any) -> Any:
    """Returns the part of the setting without `budget: auto`; None if there is none."""
    return _select(given, wants_auto=False)


def _select(given: Any, *, wants_auto: bool) -> Any:
    if not has_auto(given):
        return None if wants_auto else given
    if given.get("budget") == AUTO:
        return given if wants_auto else None
    parts = {path: _select(setting, wants_auto=wants_auto) for path, setting in given.items()}
    return {path: setting for path, setting in parts.items() if setting is not None} or None


def shares_of(model: nn.Module, given: Any) -> list[float]:
    """Returns the shares with different results, ascending, from 0 (all layers are recomputed) to 1 (none is)."""
    layers = choose_layers(model, with_budget(given, 0.0), logs=False)
    counts = Counter(kind_of(layer) for layer, _ in layers.values())
    # Rounded up, so the share of n layers keeps all n.
    shares = {math.ceil(number * _GRAIN / count) / _GRAIN for count in counts.values() for number in range(count + 1)}
    by_number = {num_recomputed(model, given, share): share for share in sorted(shares | {0.0, 1.0}, reverse=True)}
    return sorted(by_number.values())


def num_recomputed(model: nn.Module, given: Any, share: float) -> int:
    """Returns the number of layers that are recomputed with this share."""
    return len(choose_layers(model, with_budget(given, share), logs=False))


@contextmanager
def counting_held_bytes(model: nn.Module, given: Any) -> Iterator[dict[str, int]]:
    """Yields a mapping from each layer that could be recomputed to the bytes that its forward saves for the backward.

    It is filled when the layer is first called. The layer then runs again, and its saved tensors are counted and
    dropped, so this needs only the memory of one operation. Weights and inputs, which are kept in any case, do not
    count.
    """
    layers = {name: layer for name, (layer, _) in choose_layers(model, with_budget(given, 0.0), logs=False).items()}
    weights = frozenset(_storage(each) for each in [*model.parameters(), *model.buffers()])
    held: dict[str, int] = {}
    with forwards_put_back(layers.values()):
        for name, layer in layers.items():
            put_around(layer, partial(_Counted, name=name, held=held, weights=weights))
        yield held


class _Counted(Around):
    """A forward that measures its saved tensors once, into `held`."""

    def __init__(
        self, forward: Forward, *, name: str, held: dict[str, int], weights: frozenset[StorageWeakRef]
    ) -> None:
        super().__init__(forward)
        self._name = name
        self._held = held
        self._weights = weights
        self._has_counted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._has_counted:
            self._has_counted = True
            inputs = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            self._held[self._name] = _held_bytes(lambda: self.inner(*args, **kwargs), self._weights | inputs)
        return self.inner(*args, **kwargs)


def _held_bytes(run: Callable[[], Any], known: frozenset[StorageWeakRef]) -> int:
    seen: set[StorageWeakRef] = set()
    total = 0

    def count(tensor: Tensor) -> None:
        nonlocal total
        storage = _storage(tensor)
        if storage not in known and storage not in seen:
            seen.add(storage)
            total += local(tensor).untyped_storage().nbytes()

    with saved_tensors_hooks(count, _reject):
        run()
    return total


def _reject(packed: Any) -> Tensor:
    raise AssertionError("saved tensors are dropped, and there is no backward")


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Returns a key of the storage, which no later storage has, even after it was freed."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
