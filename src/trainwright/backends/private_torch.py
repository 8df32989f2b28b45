"""The private torch names that several packages need, in one place.

They cover nested containers, operations below autograd, fake tensors and the compiler. A private name that only one
file needs stays in that file, next to its reason. tests/test_private_torch.py lists them all: it fails when a torch
release drops one, when a new one is used, or when one is used outside of its file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch

# A fake tensor has a shape, a dtype and a device, but no memory. torch has no public name for it; the "meta" device is
# no substitute, since models ask tensors for their device.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# The only way to intercept every operation below autograd, independent of the caller. Documented in torch's notes on
# extending it.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# torch has no public functions for nested containers. These agree with torch.compile, DTensor and checkpointing about
# what a container is, registered user types included.
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "arguments_of",
    "compile_counters",
    "compile_error",
    "constant_in_compiled_code",
    "graph_break_error",
    "has_modes",
    "has_triton",
    "keystr",
    "side_effects_once",
    "tree_flatten",
    "tree_flatten_with_path",
    "tree_leaves",
    "tree_leaves_with_path",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "version_of",
    "without_modes",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def without_modes() -> AbstractContextManager[Any]:
    """Returns a context without active dispatch modes, in which new tensors are real."""
    return cast(AbstractContextManager[Any], _disable_current_modes())


def has_modes() -> bool:
    """Returns True while a function mode or a dispatch mode sees every operation.

    `torch.overrides` has no function for either.
    """
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def arguments_of(operation: Any) -> Sequence[Any]:
    """Returns the declared arguments of an operator (`torch.ops.aten.mm.default`): their names and defaults.

    An operator has no Python signature, and no public access to its schema.
    """
    return cast(Sequence[Any], operation._schema.arguments)


def version_of(tensor: torch.Tensor) -> int:
    """Returns how often the tensor, or a view of it, was written in place.

    Autograd checks this counter for the tensors that it saves. It is documented, but has no public name.
    """
    return tensor._version


def constant_in_compiled_code(function: Function) -> Function:
    """Makes compiled code call the function once, during compilation, instead of tracing it.

    Sets what `torch.compiler.assume_constant_result` sets, without importing Dynamo: that takes seconds, which
    commands that do not train would spend for nothing.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@constant_in_compiled_code
def has_triton() -> bool:
    """Returns True if Triton can compile kernels for this machine's GPU; torch has no public name for it."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


def compile_error() -> type[Exception]:
    """Returns the base class of torch.compile's own errors, which is not exported."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def graph_break_error() -> type[Exception]:
    """Returns the class of the error for code that does not fit into one graph, which is not exported."""
    from torch._dynamo.exc import Unsupported

    return Unsupported


def side_effects_once() -> AbstractContextManager[Any]:
    """Returns a context in which compiled code repeats no side effects while it recomputes activations.

    What a recomputed block puts into the event storage is then put in its first pass only. The setting belongs to the
    process, so it is set only for one call.
    """
    import torch._dynamo

    return cast(
        AbstractContextManager[Any],
        torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True),
    )


def compile_counters() -> Any:
    """Returns Dynamo's counters of the process, by name and reason: the only trace of breaks that leave no graph."""
    from torch._dynamo.utils import counters

    return counters
