"""Observes one eager pass and reports every host synchronization and data-dependent shape, with the user's lines.

Every operation on a tensor passes a TorchFunctionMode: `.item()`, `float(x)`, `if x:`, `print(x)`, `.cpu()` and
numpy's conversions too. Labels and token ids out of range are detected before the kernel fails on them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainwright.user_code.locations import PACKAGE, TORCH, SourceLocation, UserFiles, line_of_frame

# The Python side of methods such as Tensor.__repr__: their caller is reported.
_WRAPPERS = tuple(TORCH + name for name in ("_tensor.py", "_tensor_str.py", "overrides.py", "functional.py"))
# torch's optimizers behave differently when they are captured.
_SELF_AWARE = TORCH + "optim/"


@dataclass(frozen=True)
class HostUse:
    """A host synchronization or a data-dependent shape, with the fix."""

    what: str
    fix: str
    breaks: bool = True
    """True if it ends a compiled graph. Copies to the host are compiled, but still wait."""


_READ_LATER = "Keep it a tensor: return it as a metric, and the loop reads it once per log line."
_PRINT_LATER = "Return it as a metric, or print it in a hook: hooks run on the host, around the step."
_CHOOSE = "Choose on the device with torch.where(condition, a, b), or decide by Python values alone."
_STAY = "Stay on the device with torch's own operations; code for the host belongs in a hook or eval_end."
_STATIC = "Keep the shape fixed: torch.where(mask, x, 0), x * mask or masked_fill, and divide by mask.sum()."

HOST_USES: Mapping[str, HostUse] = {
    "item": HostUse(".item() waits for the device", _READ_LATER),
    "tolist": HostUse(".tolist() waits for the device", _READ_LATER),
    "__float__": HostUse("float(tensor) waits for the device", _READ_LATER),
    "__int__": HostUse("int(tensor) waits for the device", _READ_LATER),
    "__complex__": HostUse("complex(tensor) waits for the device", _READ_LATER),
    "__index__": HostUse(
        "a tensor is used as a Python number (an index, a range, a size)", "Use Python numbers for sizes and positions."
    ),
    "__bool__": HostUse("a tensor decides a Python branch (if, while, and, not, assert, bool())", _CHOOSE),
    "is_nonzero": HostUse("a tensor decides a Python branch", _CHOOSE),
    "__contains__": HostUse("`in` on a tensor decides a Python branch", _CHOOSE),
    "equal": HostUse("torch.equal returns a Python bool, which waits for the device", _CHOOSE),
    "allclose": HostUse("torch.allclose returns a Python bool, which waits for the device", _CHOOSE),
    "__repr__": HostUse("a tensor is printed or turned into text", _PRINT_LATER),
    "__format__": HostUse("a tensor is formatted into text", _PRINT_LATER),
    "cpu": HostUse(".cpu() copies to the host", _STAY, breaks=False),
    "numpy": HostUse(".numpy() copies to the host", _STAY, breaks=False),
    "__array__": HostUse("numpy receives a tensor, which copies it to the host", _STAY, breaks=False),
    "__dlpack__": HostUse("another library receives a tensor, which leaves the graph", _STAY),
    "nonzero": HostUse("the shape of .nonzero() depends on values", _STATIC),
    "argwhere": HostUse("the shape of argwhere depends on values", _STATIC),
    "masked_select": HostUse("the shape of masked_select depends on values", _STATIC),
    "unique": HostUse("the shape of unique depends on values", _STATIC),
    "unique_consecutive": HostUse("the shape of unique_consecutive depends on values", _STATIC),
}
_MASK = HostUse("indexing by a mask gives a shape that depends on values", _STATIC)
_MASKED_WRITE = HostUse("writing a tensor through a mask needs as many values as the mask has", _STATIC)
_SCALAR_INDEX = HostUse(
    "indexing by a tensor of one number reads it on the host", "Use x.index_select(0, index.reshape(1)) instead."
)
_WHERE = HostUse("torch.where(condition) alone gives a shape that depends on values", _STATIC)
_TO_HOST = HostUse('.to("cpu") copies to the host', _STAY, breaks=False)
_GATHERED = HostUse(
    "torch.tensor([...]) of tensors reads each of them on the host",
    "Use torch.stack([...]), which stays on the device.",
)
_REPEATED = HostUse("the shape of repeat_interleave depends on values", "Pass output_size=…, which fixes the shape.")
_ONE_HOT = HostUse("one_hot without num_classes looks for the largest value", "Pass num_classes=….")


WATCHED = ("cross_entropy", "nll_loss", "embedding", "scaled_dot_product_attention", "multi_head_attention_forward")
"""The functions whose arguments `on_values` sees."""


@dataclass(frozen=True)
class Sighting:
    """One use at one location; `is_direct` is False if the line called library code that did it."""

    use: HostUse
    location: SourceLocation
    is_direct: bool


class HostSyncMode(TorchFunctionMode):
    """Records uses of the host by user code; `on_values` sees each call before it runs.

    With `in_forward_only`, a use counts only below a function named `forward`, because the rest of a custom eval_step
    runs on the host in every mode.
    """

    def __init__(
        self,
        users: UserFiles,
        *,
        in_forward_only: bool = False,
        on_values: Callable[[str, tuple[Any, ...], Mapping[str, Any], SourceLocation | None], None] | None = None,
    ) -> None:
        super().__init__()
        self.sightings: dict[tuple[str, str], Sighting] = {}
        self._users = users
        self._in_forward_only = in_forward_only
        self._on_values = on_values

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for every operation; the mode is off while the operation itself runs."""
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        use = _host_use(name, args, kwargs)
        if use is not None:
            self._record(use)
        if self._on_values is not None and name in WATCHED:
            frame, _ = self._users_frame()
            self._on_values(name, args, kwargs, None if frame is None else line_of_frame(frame))
        return function(*args, **kwargs)

    def _record(self, use: HostUse) -> None:
        frame, is_direct = self._users_frame()
        if frame is None or (self._in_forward_only and not _is_below_forward(frame)):
            return
        location = line_of_frame(frame)
        if use is _TO_HOST and not _is_written_out(location):
            return
        self.sightings.setdefault((str(location), use.what), Sighting(use, location, is_direct))

    def _users_frame(self) -> tuple[FrameType | None, bool]:
        """Returns the user's frame that requested the operation; None if trainwright or an optimizer did."""
        frame: FrameType | None = sys._getframe(1)
        is_direct = True
        while frame is not None:
            file = frame.f_code.co_filename
            if file in self._users:
                return frame, is_direct
            if file != __file__ and file.startswith((PACKAGE, _SELF_AWARE)):
                return None, False
            is_direct = is_direct and (file == __file__ or file in _WRAPPERS)
            frame = frame.f_back
        return None, False


@contextmanager
def watching(mode: HostSyncMode) -> Iterator[None]:
    """Runs code under the mode, eagerly: functions that the user compiles run as plain Python."""
    with warnings.catch_warnings():
        # numpy's warning about a `copy` argument that torch drops while a mode is active.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad")  # recorded with its line
        with torch.compiler.set_stance("force_eager"), mode:
            yield


def _host_use(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> HostUse | None:
    if name in HOST_USES:
        return HOST_USES[name]
    if name == "to":
        return _TO_HOST if any(_names_the_host(each) for each in (*args[1:], *kwargs.values())) else None
    if name == "__getitem__" and len(args) > 1:
        return _MASK if _has_mask(args[1]) else _SCALAR_INDEX if _has_scalar_index(args[1]) else None
    if name == "__setitem__" and len(args) > 2:
        is_many = isinstance(args[2], torch.Tensor) and args[2].numel() != 1
        return _MASKED_WRITE if is_many and _has_mask(args[1]) else None
    if name == "where":
        return _WHERE if len(args) + len(kwargs) == 1 else None
    if name == "tensor":
        return _GATHERED if _holds_tensors(args[0] if args else kwargs.get("data")) else None
    if name == "repeat_interleave":
        repeats = args[1] if len(args) > 1 else kwargs.get("repeats", args[0])
        return _REPEATED if isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None else None
    if name == "one_hot":
        return _ONE_HOT if (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1 else None
    return None


def _names_the_host(value: Any) -> bool:
    # Only the string, because a torch.device may be that of the batch, which is the CPU here in any case.
    return isinstance(value, str) and value.partition(":")[0] == "cpu"


def _is_written_out(location: SourceLocation) -> bool:
    """Returns True if the line names "cpu" itself, not a choice between devices."""
    return "cpu" in location.text and " if " not in location.text and "is_available" not in location.text


def _index_parts(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _has_mask(index: Any) -> bool:
    return any(isinstance(part, torch.Tensor) and part.dtype == torch.bool for part in _index_parts(index))


def _has_scalar_index(index: Any) -> bool:
    parts: list[Any] = []
    for part in _index_parts(index):
        parts += [part.start, part.stop, part.step] if isinstance(part, slice) else [part]
    return any(isinstance(part, torch.Tensor) and part.ndim == 0 for part in parts)


def _holds_tensors(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and any(
        isinstance(each, torch.Tensor) or _holds_tensors(each) for each in data
    )


def _is_below_forward(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "forward":
            return True
        frame = frame.f_back
    return False
