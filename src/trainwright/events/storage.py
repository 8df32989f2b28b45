"""Where values wait between the step that makes them and the writer that tells them.

Putting never waits for the device: tensors stay where they are until the loop drains them, in one copy
per log period. Nothing here communicates between ranks; the loop gathers what `take_window` returns and
`windows.py` merges it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np
import torch

from trainwright.errors import HostReadError, TrainwrightError
from trainwright.events.mean import Kind, Mean, Window, add_record, window_from_state, window_to_state

RESERVED = frozenset({"step", "loss", "grad_norm", "lr"})
"""The names of the loop's own values in a log line."""
HISTORY_LENGTH = 500  # values kept per name; also what a checkpoint carries

# A plain list, not a ContextVar: torch.compile traces through it.
_stack: list[EventStorage] = []


def get_event_storage() -> EventStorage:
    """Returns the storage of the run that is under way; call it from a model, a dataset, anywhere."""
    if not _stack:
        raise TrainwrightError(
            "There is no event storage: get_event_storage() answers only during a run, and not in a loader's worker. "
            "In a test, use `with EventStorage():` around the call."
        )
    return _stack[-1]


def forget_storages() -> None:
    """Makes `get_event_storage` reject in a process that nobody drains, such as a forked loader's worker."""
    _stack.clear()


class EventStorage:
    """The values of a run, by name and step.

    A name put several times in a step is averaged; over ranks, over those that put it; over the steps of
    a log window, over the steps in which it was put. As a context manager it is the one that
    `get_event_storage()` returns.
    """

    def __init__(self, *, max_steps: int | None = None) -> None:
        self.max_steps = max_steps
        """Where the run ends, for writers that show progress; None if nobody said."""
        self.line: dict[str, Any] = {}
        """The newest line for the writers: `step`, then name → value."""
        self.evaluated: dict[str, Any] = {}
        """What of that line an evaluation gave, such as `valid/loss`."""
        self._step = 0
        self._pending: list[tuple[str, int, Any, Any, Kind]] = []
        self._traced: dict[str, tuple[torch.Tensor, torch.Tensor, Kind]] = {}
        # Of texts, lists and whole tensors only the last is ever shown, so only that is held.
        self._objects: dict[str, tuple[int, Any]] = {}
        self._window: Window = {}
        self._histories: dict[str, deque[tuple[int, Any]]] = {}
        self._scope = ""
        self._num_before_recording: int | None = None

    def __enter__(self) -> EventStorage:
        _stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack.remove(self)

    @property
    def step(self) -> int:
        """The number of the update under way (the first is 1), and between updates that of the last one."""
        if self._num_before_recording is not None:
            raise HostReadError("The storage's step is read, which would stay the same in every replay.")
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if self._traced:
            self.file_traced()
        self._step = step

    # putting: called in every step, so nothing here may wait, copy to the host or communicate

    def put_scalar(self, name: str, value: torch.Tensor | float, smoothing_hint: bool = True) -> None:
        """Notes a one-element tensor or number for this step.

        With `smoothing_hint` the log line holds the mean over its window, else the last value. Ignored
        while a checkpointed block is recomputed: its first forward has put the value already.
        """
        if not _is_scalar(value):
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TrainwrightError(f"put_scalar({name!r}): the value is {what}. Put a number or a one-element tensor.")
        _reject_reserved(self._scope + name)
        kind: Kind = "put" if smoothing_hint else "last"
        if torch.compiler.is_compiling():
            self._put_traced(self._scope + name, value, kind)
        elif not _is_recomputing():
            # Cloned, for the caller may go on changing the tensor before it is drained.
            settled = value.detach().clone() if isinstance(value, torch.Tensor) else value
            self._pending.append((self._scope + name, self._step, settled, 1.0, kind))

    def put_scalars(
        self, values: Mapping[str, Any] | None = None, /, *, smoothing_hint: bool = True, **more: Any
    ) -> None:
        """Notes several scalars, given as a mapping or as keywords."""
        for name, value in {**(values or {}), **more}.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def put_metric(self, name: str, value: Any, weight: Any) -> None:
        """Notes a metric of this step: a Mean, a value that weighs `weight`, or an object that is kept as it is.

        Detached but not cloned: what `Update.apply` returns aliases nothing.
        """
        if isinstance(value, Mean):
            self._pending.append((name, self._step, value.total, value.count, "total"))
        elif _is_scalar(value):
            held = value.detach() if isinstance(value, torch.Tensor) else value
            self._pending.append((name, self._step, held, weight, "mean"))
        else:
            self._objects[name] = (self._step, value.detach() if isinstance(value, torch.Tensor) else value)

    def put_result(self, result: Any, *, weight: Any, num_samples: int, share: float = 1.0) -> None:
        """Notes what an update gave: (loss, metrics, grad_norm, lr); `weight` is what the loss weighs.

        Loss and norm are those of all ranks together: each notes its `share` of their weight, so that a window that
        was begun by more ranks or fewer weighs its steps alike.
        """
        try:
            loss, metrics, grad_norm, lr = result
        except (TypeError, ValueError):
            raise TrainwrightError(
                f"train_step must return (loss, metrics, grad_norm, lr), as update.apply() does; got {result!r}."
            ) from None
        self.put_metric("loss", loss, weight if share == 1.0 else weight * share)
        self.put_metric("grad_norm", grad_norm, share)
        self._pending.append(("lr", self._step, lr, 1.0, "last"))
        for name, value in metrics.items():
            _reject_reserved(name)
            if name.startswith("lr/"):
                self.put_last(name, value)
            else:
                self.put_metric(name, value, num_samples)

    def put_last(self, name: str, value: Any) -> None:
        """Notes a value of which a log line holds the last one: a learning rate, a text, a list."""
        self._pending.append((name, self._step, value, 1.0, "last"))

    def put_timing(self, name: str, total: float, count: float) -> None:
        """Notes plain numbers of the host, which a log line holds as their sum over their counts' sum."""
        self._pending.append((name, self._step, total, count, "total"))

    def put_spread(self, name: str, seconds: float) -> None:
        """Notes what this rank alone needed; a log line holds the share that the ranks waited for the slowest."""
        self._pending.append((name, self._step, seconds, 1.0, "spread"))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefixes every name put inside with `name/`."""
        outer, self._scope = self._scope, f"{self._scope}{name}/"
        try:
            yield
        finally:
            self._scope = outer

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Drops what is put inside the block: a trial forward leaves no values."""
        kept = dict(vars(self))
        self._pending, self._traced, self._objects, self._window = [], {}, {}, {}
        self._histories = {name: values.copy() for name, values in self._histories.items()}
        _stack.append(self)
        try:
            yield
        finally:
            _stack.remove(self)
            vars(self).update(kept)

    # a step that is recorded: its code runs once, and what it puts is put again after each replay

    def begin_recording(self) -> None:
        """Keeps what is put from here on apart."""
        self.file_traced()
        self._num_before_recording = len(self._pending)

    def end_recording(self) -> list[tuple[str, Any, Any, Kind]]:
        """Returns what was put since, as (name, value, weight, kind), and forgets it."""
        if self._num_before_recording is None:
            return []
        self.file_traced()
        puts = [(name, *rest) for name, _, *rest in self._pending[self._num_before_recording :]]
        del self._pending[self._num_before_recording :]
        self._num_before_recording = None
        return puts

    def put_again(self, puts: Sequence[Sequence[Any]]) -> None:
        """Notes for this step what `end_recording` returned, with the values of a replay."""
        for name, value, weight, kind in puts:
            self._pending.append((name, self._step, value, weight, kind))

    # reading: waits for the device

    def history(self, name: str) -> list[tuple[int, Any]]:
        """Returns the last values of a name on this rank, oldest first, as (step, value)."""
        self.drain()
        if name not in self._histories:
            raise KeyError(f"no value named {name!r} was put; known: {', '.join(sorted(self._histories)) or 'none'}")
        return list(self._histories[name])

    def latest(self) -> dict[str, tuple[Any, int]]:
        """Returns the newest value of every name on this rank as (value, step)."""
        self.drain()
        return {name: (values[-1][1], values[-1][0]) for name, values in self._histories.items()}

    # the loop's side

    def drain(self) -> None:
        """Moves what is pending to the host, in one copy per device and dtype, and files it by name and step."""
        self.file_traced()
        pending, self._pending = self._pending, []
        values = _to_host([record[2] for record in pending])
        weights = _to_host([record[3] for record in pending])
        touched: dict[tuple[str, int], None] = {}
        for (name, step, _, _, kind), value, weight in zip(pending, values, weights, strict=True):
            add_record(self._window, name, step, value, weight, kind)
            touched[name, step] = None
        objects, self._objects = self._objects, {}
        for name, (step, value) in objects.items():
            held = value.cpu().tolist() if isinstance(value, torch.Tensor) else value
            add_record(self._window, name, step, held, 1.0, "last")
            touched[name, step] = None
        for name, step in touched:
            series = self._window[name]
            # A name that changed its kind meanwhile began anew; of a spread this rank alone knows nothing.
            if step in series.steps and series.kind != "spread":
                self._remember(name, step, series.value_at(step))

    def take_window(self) -> Window:
        """Returns the values since the last call and begins a new window."""
        self.drain()
        window, self._window = self._window, {}
        return window

    def peek_window(self) -> Window:
        """Returns the values of the open window without closing it."""
        self.drain()
        return self._window

    def publish(self, training: Mapping[str, Any], *, evaluated: Mapping[str, Any] | None = None) -> None:
        """Makes the line that the writers are shown next, of a window's logs and of an evaluation's."""
        self.evaluated = dict(evaluated or {})
        self.line = {"step": self._step, **{name: _plain(value) for name, value in training.items()}, **self.evaluated}
        for name, value in self.evaluated.items():
            self._remember(name, self._step, value)

    def state_dict(self, window: Window | None = None) -> dict[str, Any]:
        """Returns the histories and the open window (`window`, where the loop has merged those of all ranks)."""
        own = self.peek_window()
        histories = {name: [list(entry) for entry in values] for name, values in self._histories.items()}
        state = {"window": window_to_state(own if window is None else window), "histories": histories}
        return {key: _storable(value) for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any], *, with_window: bool = True) -> None:
        """Restores `state_dict`; one rank alone takes the window, which already counts all ranks."""
        self._pending, self._traced, self._objects = [], {}, {}
        self._window = window_from_state(state["window"]) if with_window else {}
        self._histories = {
            name: deque(((int(step), value) for step, value in values), maxlen=HISTORY_LENGTH)
            for name, values in state["histories"].items()
        }

    def _put_traced(self, name: str, value: torch.Tensor | float, kind: Kind) -> None:
        """Puts from compiled code: adds up on the device by name, reading neither the step nor any number.

        What traced code reads it is guarded on. A list that grows, or a step that counts, would have the
        code compiled anew at every call, up to the limit at which torch gives up; the names settle at once.
        """
        total = torch.as_tensor(value).detach()
        total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
        count = torch.ones_like(total)
        if kind == "put" and name in self._traced:
            earlier, number, _ = self._traced[name]
            total, count = total + earlier, count + number
        self._traced[name] = (total, count, kind)

    def file_traced(self) -> None:
        """Takes notice of what compiled code has put, so that the next call finds no names and needs no other code."""
        for name, (total, count, kind) in self._traced.items():
            self._pending.append((name, self._step, total, count, kind))
        self._traced = {}

    def _remember(self, name: str, step: int, value: Any) -> None:
        values = self._histories.setdefault(name, deque(maxlen=HISTORY_LENGTH))
        if values and values[-1][0] == step:
            values[-1] = (step, value)
        else:
            values.append((step, value))


def _reject_reserved(name: str) -> None:
    if name in RESERVED:
        raise TrainwrightError(f"A metric is named {name!r}, as a value of the loop's own. Give it another name.")


def _plain(value: Any) -> Any:
    """A user's log value as a number, where it is one."""
    if isinstance(value, Mean):
        value = value.value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _is_scalar(value: Any) -> bool:
    # Real, for numpy's numbers are no Python floats.
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)


def _storable(value: Any) -> Any:
    """Replaces what a checkpoint cannot hold (a user's object as a metric) by its text, as in metrics.json."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _is_recomputing() -> bool:
    """Is this forward a recomputation inside backward? Gradient hooks run there too, but without grad mode."""
    # The only sign of a running backward: the public hooks see tensors and nodes, not a forward inside of one.
    inside_backward: bool = torch._C._current_graph_task_id() != -1
    return inside_backward and torch.is_grad_enabled()


def _flat(value: torch.Tensor) -> torch.Tensor:
    held = value.detach() if value.requires_grad else value
    return held.reshape(()) if held.ndim else held


def _to_host(values: list[Any]) -> list[Any]:
    """Replaces tensors and numpy's numbers among the values by Python's, with one copy per device and dtype."""
    hosted = list(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            if value.numel() == 1:
                groups.setdefault((value.device, value.dtype), []).append(index)
            else:
                hosted[index] = value.detach().cpu().tolist()
        elif isinstance(value, np.generic):
            hosted[index] = value.item()
    for indices in groups.values():
        stacked = torch.stack([_flat(values[index]) for index in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            hosted[index] = number
    return hosted
