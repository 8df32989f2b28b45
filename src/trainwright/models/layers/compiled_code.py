"""What the layers tell torch's compiler, without importing it: that takes seconds, and eager runs do not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_in_compiled_code(function: Function) -> Function:
    """Has compiled code call a function once, while it is compiled, instead of looking into it.

    The mark is what torch.compiler.assume_constant_result sets.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


@constant_in_compiled_code
def has_triton() -> bool:
    """Is there a compiler of kernels for this machine's GPU?"""
    from torch.utils._triton import has_triton

    return bool(has_triton())
