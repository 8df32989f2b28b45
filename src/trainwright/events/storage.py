"""Stores values from the step that puts them until a writer receives them.

Putting never waits for the device: tensors stay on it until the loop drains them, in one copy per log period. It does
not communicate either: a sharded value (a DTensor) is kept until the loop calls `gather_shards` on all ranks, and then
gathers the result of `take_window`, which mean.py merges.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from numbers import Real
from typing import Any

import numpy as np
import torch

from trainwright.errors import HostReadError, TrainwrightError
from trainwright.events.mean import (
    Kind,
    Mean,
    Window,
    add_record,
    detached_copy,
    is_dtensor,
    is_sharded,
    window_from_state,
    window_to_state,
)
from trainwright.events.media import (
    MAX_BYTES,
    Histogram,
    Media,
    MediaKind,
    Put,
    add_histograms,
    to_host,
    validate_histogram,
    validate_image,
    validate_traced_histogram,
)

logger = logging.getLogger(__name__)

RESERVED = frozenset({"step", "loss", "grad_norm", "lr"})
"""The loop's own names in a log line."""
HISTORY_LENGTH = 500  # values kept per name, also in a checkpoint

# A plain list instead of a ContextVar, because torch.compile can trace it.
_stack: list[EventStorage] = []


def get_event_storage() -> EventStorage:
    """Returns the storage of the current run; callable from a model, a dataset, anywhere."""
    if not _stack:
        raise TrainwrightError(
            "There is no event storage: get_event_storage() works only during a run, and not in a data worker. "
            "In a test, use `with EventStorage():` around the call."
        )
    return _stack[-1]


def forget_storages() -> None:
    """Makes `get_event_storage` raise in a process whose values are not read, such as a forked data worker."""
    _stack.clear()


class EventStorage:
    """The values of a run, by name and step.

    Values put several times in a step are averaged; over ranks, over those that put it; over a log window, over the
    steps in which it was put. As a context manager it is the storage that `get_event_storage()` returns.
    """

    def __init__(self, *, max_steps: int | None = None, keeps_media: bool = True) -> None:
        """Without `keeps_media`, texts, and images and histograms of tensors that are not sharded, are ignored.

        That is the case on ranks other than the first of those that compute the same part of the model.
        """
        self.max_steps = max_steps
        """The last step of the run, for writers that show progress; None if unknown."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this process has committed, for writers that show progress."""
        self.line: dict[str, Any] = {}
        """The newest line for the writers: `step`, then name → value."""
        self.evaluated: dict[str, Any] = {}
        """The values of that line that come from an evaluation, such as `valid/loss`."""
        self.images: dict[str, np.ndarray] = {}
        """The images that were put since the previous line, as uint8 arrays of shape [height, width, channels]."""
        self.histograms: dict[str, Histogram] = {}
        """The histograms that were put since the previous line."""
        self.texts: dict[str, str] = {}
        """The texts that were put since the previous line."""
        self._keeps_media = keeps_media
        self._media: dict[tuple[MediaKind, str], tuple[int, Put]] = {}
        """The last image, histogram and text of each name, with its step."""
        self._traced_media: dict[tuple[MediaKind, str], Put] = {}
        self._media_before_recording: dict[tuple[MediaKind, str], tuple[int, Put]] = {}
        self._warned: set[str] = set()
        self._step = 0
        self._pending: list[tuple[str, int, Any, Any, Kind]] = []
        self._sharded: list[tuple[str, int, Any, Any, Kind]] = []
        """Records whose value or weight is a DTensor."""
        self._traced: dict[str, tuple[torch.Tensor, torch.Tensor, Kind]] = {}
        # Only the last text, list or large tensor of a name is stored, because only that one is shown.
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
        """The number of the current update (the first is 1); between updates, the number of the last one."""
        if self._num_before_recording is not None:
            raise HostReadError("The storage's step is read, but a replay would not change it.")
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if self._traced or self._traced_media:
            self.file_traced()
        self._step = step

    # Putting. Called in every step, so nothing here synchronizes, copies to the host or communicates.

    def put_scalar(self, name: str, value: torch.Tensor | float, smoothing_hint: bool = True) -> None:
        """Stores a one-element tensor or number for this step.

        With `smoothing_hint` the log line has the mean over its window, otherwise the last value. Ignored while a
        checkpointed block is recomputed, because its first forward has already put the value.
        """
        if not _is_scalar(value):
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise TrainwrightError(f"put_scalar({name!r}): the value is {what}. Put a number or a one-element tensor.")
        name = self._scope + name
        _reject_reserved(name)
        kind: Kind = "put" if smoothing_hint else "last"
        if torch.compiler.is_compiling():
            self._put_traced(name, value, kind)
        elif not _is_recomputing():
            # Cloned, because the caller may change the tensor in place before it is read.
            self._pending.append((name, self._step, detached_copy(value), 1.0, kind))

    def put_scalars(
        self, values: Mapping[str, Any] | None = None, /, *, smoothing_hint: bool = True, **more: Any
    ) -> None:
        """Stores several scalars, given as a mapping or as keywords."""
        for name, value in {**(values or {}), **more}.items():
            self.put_scalar(name, value, smoothing_hint=smoothing_hint)

    def put_image(self, name: str, image: Any, *, normalize: bool = False) -> None:
        """Stores an image: a tensor or array of shape CHW, HWC or HW, or a PIL image.

        Integers are between 0 and 255, floats between 0 and 1; with `normalize` the smallest value becomes black and
        the largest white. The next log line has the last image of each name. With several ranks only the images of the
        first data rank are stored; a sharded image is gathered from all of its ranks. Like `put_scalar`, it may be
        called anywhere and does not wait for the device.
        """
        self._put_media("image", name, image, normalize)

    def put_histogram(self, name: str, values: Any) -> None:
        """Stores the distribution of the values of a tensor, an array or a sequence of numbers.

        The values are counted on their device. Several puts of a name in one step add up; the next log line has the
        values of the last step. A sharded tensor is counted on all of its ranks, others on the first data rank.
        """
        self._put_media("histogram", name, values, None)

    def put_text(self, name: str, text: str) -> None:
        """Stores a text, such as a generated sample; see `put_image`."""
        if not isinstance(text, str):
            raise TrainwrightError(f"put_text({name!r}): the text is a {type(text).__name__}. Put str(value).")
        self._put_media("text", name, text, None)

    def _put_media(self, kind: MediaKind, name: str, value: Any, extra: Any) -> None:
        name = self._scope + name
        _reject_reserved(name)
        is_compiling = torch.compiler.is_compiling()
        if not self._keeps_media and (is_compiling or kind == "text" or not is_sharded(value)):
            return
        if is_compiling:
            self._put_traced_media(kind, name, value, extra)
        elif not _is_recomputing():
            put: Put | None = Put(value)
            if kind == "image":
                put = validate_image(name, value, normalize=extra)
            elif kind == "histogram":
                put = validate_histogram(name, value)
            if put is not None:
                self._file_media(kind, name, put)

    def _put_traced_media(self, kind: MediaKind, name: str, value: Any, extra: Any) -> None:
        """Puts from compiled code: see `_put_traced`."""
        key = (kind, name)
        if kind == "image":
            self._traced_media[key] = validate_image(name, value, normalize=extra)
        elif kind == "text":
            self._traced_media[key] = Put(value)
        else:
            put = validate_traced_histogram(value)
            if key in self._traced_media:
                put = add_histograms(self._traced_media[key], put)
            self._traced_media[key] = put

    def _file_media(self, kind: MediaKind, name: str, put: Put) -> None:
        """Stores a value for the next line, unless it would take too much memory."""
        step, earlier = self._media.pop((kind, name), (None, None))
        if kind == "histogram" and step == self._step and earlier is not None:
            put = add_histograms(earlier, put)
        if put.num_bytes + sum(each.num_bytes for _, each in self._media.values()) > MAX_BYTES:
            self._warn_once(
                "size",
                f"put_{kind}({name!r}) is ignored: images, histograms and texts of one log line take more than "
                f"{MAX_BYTES // 2**20} MiB. Put fewer or smaller ones, or lower log.every_steps.",
            )
            return
        self._media[kind, name] = (self._step, put)

    def _warn_once(self, subject: str, problem: str) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning("%s", problem)

    def put_metric(self, name: str, value: Any, weight: Any) -> None:
        """Stores a metric of this step: a Mean, a scalar with a weight, or any object; for objects, the last one is
        kept.

        Tensors are detached but not cloned: the caller must not change them in place.
        """
        if isinstance(value, Mean):
            self._pending.append((name, self._step, value.total, value.count, "total"))
            return
        if isinstance(value, torch.Tensor):
            value = value.detach()
        if _is_scalar(value):
            self._pending.append((name, self._step, value, weight, "mean"))
        else:
            self._objects[name] = (self._step, value)

    def put_result(self, result: Any, *, weight: Any, num_samples: int, share: float = 1.0) -> None:
        """Stores the result of an update, (loss, metrics, grad_norm, lr), with the weight of its loss.

        Loss and norm are those of all ranks. Each rank stores them with its `share` of their weight, so that a window
        that began with another number of ranks weights its steps equally.
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
                self._pending.append((name, self._step, value, 1.0, "last"))
            else:
                self.put_metric(name, value, num_samples)

    def put_imbalance(self, name: str, seconds: float) -> None:
        """Stores the seconds that this rank worked; the log line has the share of time that ranks wait for others."""
        self._pending.append((name, self._step, [seconds], 1.0, "imbalance"))

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
        """Discards the values that are put inside the block, for a trial forward."""
        kept = dict(vars(self))
        self._pending, self._sharded, self._traced, self._objects, self._window = [], [], {}, {}, {}
        self._media, self._traced_media = {}, {}
        self._histories = {name: values.copy() for name, values in self._histories.items()}
        _stack.append(self)
        try:
            yield
        finally:
            _stack.remove(self)
            vars(self).update(kept)

    # A captured step: its code runs once; its values are put again after each replay.

    def begin_recording(self) -> None:
        """Separates the values that are put from now on."""
        self.file_traced()
        self._num_before_recording = len(self._pending)
        self._media_before_recording, self._media = self._media, {}

    def end_recording(self) -> list[tuple[str, Any, Any, Kind | MediaKind]]:
        """Returns the values put since `begin_recording` as (name, value, weight, kind), and removes them."""
        if self._num_before_recording is None:
            return []
        self.file_traced()
        puts: list[Any] = [(name, *rest) for name, _, *rest in self._pending[self._num_before_recording :]]
        puts += [(name, *put, kind) for (kind, name), (_, put) in self._media.items()]
        del self._pending[self._num_before_recording :]
        self._media = self._media_before_recording
        self._num_before_recording = None
        return puts

    def put_again(self, puts: Sequence[Sequence[Any]]) -> None:
        """Stores the result of `end_recording` for this step, with the values of a replay."""
        for name, value, weight, kind in puts:
            if kind in ("image", "histogram", "text"):
                self._file_media(kind, name, Put(value, weight))
            else:
                self._pending.append((name, self._step, value, weight, kind))

    # Reading. Waits for the device.

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

    # The loop's methods.

    def gather_shards(self, gather: Callable[[Any], list[Any]]) -> None:
        """Replaces pending DTensors by their full values; collective.

        `gather` returns an object of every rank, in rank order. Before that, a drain omits DTensors.
        """
        self._set_shards_aside()
        sharded, self._sharded = self._sharded, []
        objects = {name: entry for name, entry in self._objects.items() if is_sharded(entry[1])}
        images = {name: put for (kind, name), (_, put) in self._media.items() if kind == "image" and is_sharded(put[0])}
        scalars = [((name, step), [value, weight]) for name, step, value, weight, _ in sharded]
        texts = [((name, step), [value]) for name, (step, value) in objects.items()]
        full = full_values([*scalars, *texts, *((name, [put.value]) for name, put in images.items())], gather)
        for (name, step, _, _, kind), (value, weight) in zip(sharded, full, strict=False):
            self._pending.append((name, step, value, weight, kind))
        for name, (value,) in zip(objects, full[len(sharded) :], strict=False):
            self._objects[name] = (objects[name][0], value)
        for name, (value,) in zip(images, full[len(sharded) + len(objects) :], strict=True):
            step, put = self._media.pop(("image", name))
            if self._keeps_media:
                self._media["image", name] = (step, Put(value, put.extra))

    def drain(self) -> None:
        """Moves pending values to the host, in one copy per device and dtype, and files them by name and step."""
        self._set_shards_aside()
        pending, self._pending = self._pending, []
        hosted = _to_host([each for _, _, value, weight, _ in pending for each in (value, weight)])
        records = [
            (name, step, value, weight, kind)
            for (name, step, _, _, kind), value, weight in zip(pending, hosted[::2], hosted[1::2], strict=True)
        ]
        objects, self._objects = self._objects, {}
        for name, (step, value) in objects.items():
            value = _local_if_replicated(value)
            if is_sharded(value):
                self._objects[name] = (step, value)
                continue
            records.append((name, step, value.tolist() if isinstance(value, torch.Tensor) else value, 1.0, "last"))
        for record in records:
            add_record(self._window, *record)
        for name, step in dict.fromkeys(record[:2] for record in records):
            series = self._window[name]
            # A name whose kind has changed started over; an imbalance needs the values of other ranks.
            if step in series.steps and series.kind != "imbalance":
                self._remember(name, step, series.value_at(step))

    def _set_shards_aside(self) -> None:
        """Moves pending records with DTensors to `_sharded`; of replicated ones this rank has the value."""
        self.file_traced()
        values = [each for _, _, value, weight, _ in self._pending for each in (value, weight)]
        if not any(map(is_dtensor, [each for each in values if isinstance(each, torch.Tensor)])):
            return
        pending, self._pending = self._pending, []
        for name, step, value, weight, kind in pending:
            value, weight = _local_if_replicated(value), _local_if_replicated(weight)
            records = self._sharded if is_sharded(value) or is_sharded(weight) else self._pending
            records.append((name, step, value, weight, kind))

    def take_window(self) -> Window:
        """Returns the values since the last call and begins a new window."""
        self.drain()
        window, self._window = self._window, {}
        return window

    @property
    def has_media(self) -> bool:
        """True if images, histograms or texts wait for a line."""
        return bool(self._media or self._traced_media)

    def take_media(self) -> Media:
        """Returns the images, histograms and texts since the last call, on the host."""
        self.file_traced()
        puts, self._media = {key: put for key, (_, put) in self._media.items()}, {}
        return to_host(puts, warn=self._warn_once) if puts else Media()

    def adopt_media(self, other: EventStorage, *, prefix: str) -> None:
        """Moves the images, histograms and texts of another storage, such as that of an evaluation set, to this one."""
        other.file_traced()
        for (kind, name), (_, put) in other._media.items():
            self._file_media(kind, prefix + name, put)
        other._media = {}

    def peek_window(self) -> Window:
        """Returns the values of the open window without closing it."""
        self.drain()
        return self._window

    def publish(
        self,
        training: Mapping[str, Any],
        *,
        evaluated: Mapping[str, Any] | None = None,
        media: Media | None = None,
    ) -> None:
        """Creates the next line for the writers, from the logs of a window and of an evaluation."""
        media = media or Media()
        self.images, self.histograms, self.texts = media.images, media.histograms, media.texts
        self.evaluated = dict(evaluated or {})
        self.line = {"step": self._step, **{name: _plain(value) for name, value in training.items()}, **self.evaluated}
        self.remember(self.evaluated)

    def remember(self, evaluated: Mapping[str, Any]) -> None:
        """Adds the logs of an evaluation of this step to the histories."""
        for name, value in evaluated.items():
            self._remember(name, self._step, value)

    def state_dict(self, window: Window | None = None) -> dict[str, Any]:
        """Returns the histories and the open window: `window` if the loop has merged those of all ranks."""
        own = self.peek_window()
        histories = {name: [list(entry) for entry in values] for name, values in self._histories.items()}
        state = {"window": window_to_state(own if window is None else window), "histories": histories}
        return {key: _storable(value) for key, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any], *, with_window: bool = True) -> None:
        """Restores `state_dict`; only one rank restores the window, which has the values of all ranks."""
        self._pending, self._sharded, self._traced, self._objects = [], [], {}, {}
        self._media, self._traced_media = {}, {}
        self._window = window_from_state(state["window"]) if with_window else {}
        self._histories = {
            name: deque(((int(step), value) for step, value in values), maxlen=HISTORY_LENGTH)
            for name, values in state["histories"].items()
        }

    def _put_traced(self, name: str, value: torch.Tensor | float, kind: Kind) -> None:
        """Puts from compiled code: adds up on the device by name, without reading the step or any number.

        Compiled code has a guard on every value that it reads. A growing list or a counted step would recompile it at
        every call, up to torch's limit; the set of names does not change after the first step.
        """
        total = torch.as_tensor(value).detach()
        total = total.to(torch.promote_types(total.dtype, torch.float32), copy=True)
        count = torch.ones_like(total)
        if kind == "put" and name in self._traced:
            earlier, number, _ = self._traced[name]
            total, count = total + earlier, count + number
        self._traced[name] = (total, count, kind)

    def file_traced(self) -> None:
        """Moves the values put by compiled code to the pending ones, so that the next call finds no names and no new
        guard."""
        for name, (total, count, kind) in self._traced.items():
            self._pending.append((name, self._step, total, count, kind))
        self._traced = {}
        for (media_kind, name), put in self._traced_media.items():
            self._file_media(media_kind, name, put)
        self._traced_media = {}

    def _remember(self, name: str, step: int, value: Any) -> None:
        values = self._histories.get(name)
        if values is None:
            values = self._histories[name] = deque(maxlen=HISTORY_LENGTH)
        if values and values[-1][0] == step:
            values.pop()
        values.append((step, value))


def _reject_reserved(name: str) -> None:
    if name in RESERVED:
        raise TrainwrightError(f"The metric name {name!r} is reserved for the loop's own value. Use another name.")


def _plain(value: Any) -> Any:
    """Returns a user's log value as a number if it is one."""
    if isinstance(value, Mean):
        value = value.value
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _local_if_replicated(value: Any) -> Any:
    return value.to_local() if is_dtensor(value) and not is_sharded(value) else value


def full_values(labeled: Sequence[tuple[Any, Sequence[Any]]], gather: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """Returns the values of each label, with full tensors instead of DTensors; collective.

    The ranks of a DTensor's mesh must have it under the same label, in the same order. Otherwise all ranks raise
    instead of waiting for a rank that does not participate.
    """
    full = [list(map(_local_if_replicated, values)) for _, values in labeled]
    sharded = [
        (tuple(value.device_mesh.mesh.flatten().tolist()), label, entry, place)
        for entry, (label, values) in enumerate(labeled)
        for place, value in enumerate(values)
        if is_sharded(value)
    ]
    by_mesh: dict[tuple[int, ...], list[Any]] = {}
    for members, label, _, _ in sharded:
        by_mesh.setdefault(members, []).append(label)
    _reject_absent(gather(by_mesh))
    # Sorted by mesh, so that ranks of several meshes run their collectives in the same order.
    for _, _, entry, place in sorted(sharded, key=lambda each: each[0]):
        full[entry][place] = full[entry][place].full_tensor()
    return full


def full_logs(logs: Mapping[str, Any], gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Returns logs that user code returned, with full tensors instead of DTensors; collective, see `full_values`."""
    parts = [[value.total, value.count] if isinstance(value, Mean) else [value] for value in logs.values()]
    full = full_values(list(zip(logs, parts, strict=True)), gather)
    return {name: Mean(*values) if len(values) == 2 else values[0] for name, values in zip(logs, full, strict=True)}


def _reject_absent(by_rank: Sequence[Mapping[tuple[int, ...], Sequence[Any]]]) -> None:
    for members in sorted({members for each in by_rank for members in each}):
        labels = {rank: list(by_rank[rank].get(members, ())) for rank in members}
        if all(each == labels[members[0]] for each in labels.values()):
            continue
        # The labels at the first position where the ranks differ.
        here = next(each for each in zip_longest(*labels.values()) if any(label != each[0] for label in each))
        label = next(label for label in here if label is not None)
        having = [rank for rank, other in zip(members, here, strict=True) if other == label]
        name = label[0] if isinstance(label, tuple) else label
        raise TrainwrightError(
            f"The value {name!r} is computed from sharded parameters, whose shards are on the ranks "
            f"{', '.join(map(str, members))}, but only rank {', '.join(map(str, having))} put or returned it. Compute "
            "it on every rank, not under is_main_process or a condition that differs between ranks."
        )


def _is_scalar(value: Any) -> bool:
    # Real, because numpy's numbers are not Python floats.
    return value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, Real)


def _storable(value: Any) -> Any:
    """Replaces objects that a checkpoint cannot store (a user's metric) with their text, as in metrics.json."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_storable(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _is_recomputing() -> bool:
    """Returns True in a forward that backward recomputes. Gradient hooks run inside backward too, without grad mode."""
    # No public function tells whether backward is running, and public hooks receive only tensors and nodes.
    inside_backward: bool = torch._C._current_graph_task_id() != -1
    return inside_backward and torch.is_grad_enabled()


def _to_host(values: list[Any]) -> list[Any]:
    """Replaces one-element tensors and numpy's numbers with Python's, with one copy per device and dtype."""
    hosted = list(values)
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(index)
        elif isinstance(value, np.generic):
            hosted[index] = value.item()
    for indices in groups.values():
        tensors = [values[index] for index in indices]
        with torch.no_grad():
            numbers = torch.stack([each.reshape(()) if each.ndim else each for each in tensors]).tolist()
        for index, number in zip(indices, numbers, strict=True):
            hosted[index] = number
    return hosted
