"""The base class of writers that send the log to a service: Weights & Biases, MLflow, Trackio, or your own.

A service that fails, is slow or cannot be reached never stops or delays training: lines wait in a bounded queue, a
thread of each tracker sends them, and errors are logged. A resumed run continues the run of the service: `start`
returns the last step that the service has, and the thread sends every later line of metrics.json before the new ones,
so that none is missing and none is sent twice.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainwright.events import EventStorage
from trainwright.events.media import MAX_BYTES, Media
from trainwright.safe_text import mask_secrets
from trainwright.writers.json_lines import FILE_NAME
from trainwright.writers.writer import RunInfo, Writer

logger = logging.getLogger(__name__)

MAX_WAITING = 1000
"""The lines that may wait for a slow service; further ones, and images over `MAX_BYTES`, are dropped with a warning."""
RETRY_SECONDS = 60.0
"""The time between two attempts to start a run at the service."""
_ERRORS_PER_MESSAGE = 100


@dataclass(frozen=True, slots=True)
class LogLine:
    """One log line for a service."""

    step: int
    numbers: dict[str, float]
    media: Media = field(default_factory=Media)

    @property
    def num_bytes(self) -> int:
        """The size of its images."""
        return sum(image.nbytes for image in self.media.images.values())


@dataclass(slots=True)
class _Bytes:
    """The size of images that were queued and sent; each is changed by one thread only."""

    put: int = 0
    sent: int = 0


class Tracker(Writer):
    """Sends each log line to a service, in a thread. Override `start`, `send` and `finish`, which the thread calls.

    `artifacts` are glob patterns of files or folders in the run folder, which are uploaded when the run ends, such as
    `config.yaml` or `checkpoints/step-*`. At the end the run waits at most `timeout_seconds` for the service.
    """

    service: ClassVar[str]
    """The name of the service in messages."""

    def __init__(self, artifacts: list[str] | str | None = None, timeout_seconds: float = 60.0) -> None:
        self._patterns = (artifacts,) if isinstance(artifacts, str) else tuple(artifacts or ())
        self.timeout_seconds = timeout_seconds
        self._waiting: queue.Queue[LogLine | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._is_closing = threading.Event()
        self._outer_error: BaseException | None = None
        self._has_failed = False
        self._num_dropped = self._num_errors = 0
        self._num_bytes = _Bytes()

    # For subclasses. Called in the thread; exceptions are logged.

    def start(self, run: RunInfo) -> int:
        """Opens the run at the service, or continues it; returns the last step that the service has, or 0."""
        raise NotImplementedError(f"{type(self).__name__} must override start(run).")

    def send(self, line: LogLine) -> None:
        """Sends one line."""
        raise NotImplementedError(f"{type(self).__name__} must override send(line).")

    def upload(self, path: Path, name: str) -> None:
        """Uploads a file or folder under a name; called before `finish` for each match of `artifacts`."""

    def finish(self, *, failed: bool) -> None:
        """Ends the run at the service; `failed` is True if an error ended the run."""

    # The contract of a writer. Called by the loop; nothing here waits for the service, except `close`.

    def begin(self, run: RunInfo) -> None:
        """Starts the thread."""
        # Arguments of the thread, because the thread of an earlier run may still wait for its service and must not
        # consume these lines.
        self._waiting, self._is_closing = queue.Queue(MAX_WAITING), threading.Event()
        self._num_bytes = _Bytes()
        arguments = (run, self._waiting, self._is_closing, self._num_bytes)
        self._outer_error = sys.exc_info()[1]  # a program may train again after an error
        # A daemon, because a service that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._work, args=arguments, name=f"writer-{self.service}", daemon=True)
        self._thread.start()

    def write(self, storage: EventStorage) -> None:
        """Queues the line."""
        media = Media(storage.images, storage.histograms, {**_texts_of(storage.line), **storage.texts})
        self._put(LogLine(storage.line["step"], _numbers_of(storage.line), media))

    def close(self) -> None:
        """Waits until the service has all lines, for a limited time."""
        if self._thread is None:
            return
        # Called while the error that ended the run propagates.
        self._has_failed = sys.exc_info()[1] not in (None, self._outer_error)
        self._is_closing.set()
        deadline = time.monotonic() + self.timeout_seconds
        try:
            self._waiting.put(None, timeout=self.timeout_seconds)
            self._thread.join(max(deadline - time.monotonic(), 0.0))
        except queue.Full:
            pass  # the thread is waiting for the service
        if self._thread.is_alive():
            logger.warning(
                "%s did not answer within %g seconds: the last lines were not sent.",
                self.service,
                self.timeout_seconds,
            )
        self._thread = None

    def _put(self, line: LogLine) -> None:
        num_bytes = self._num_bytes.put - self._num_bytes.sent + line.num_bytes
        if num_bytes > MAX_BYTES:
            self._report_dropped(f"images of {num_bytes // 2**20} MiB wait for it, and those of step {line.step}")
            line = replace(line, media=replace(line.media, images={}))
        try:
            self._waiting.put_nowait(line)
            self._num_bytes.put += line.num_bytes
        except queue.Full:
            self._report_dropped(f"{MAX_WAITING} lines wait for it, and that of step {line.step}")

    def _report_dropped(self, what: str) -> None:
        self._num_dropped += 1
        if self._num_dropped % _ERRORS_PER_MESSAGE == 1:
            logger.warning("%s is too slow: %s is dropped.", self.service, what)

    # The thread.

    def _work(
        self, run: RunInfo, waiting: queue.Queue[LogLine | None], is_closing: threading.Event, num_bytes: _Bytes
    ) -> None:
        """Starts the run at the service and sends lines until `close`."""
        last_step = self._start(run, is_closing)
        if last_step is None:
            while waiting.get() is not None:  # `close` may wait for space in the queue
                pass
            return
        for line in _unsent_lines(run, last_step, waiting):
            if line.step > last_step:
                try:
                    self.send(line)
                except Exception as error:
                    self._report(f"could not send step {line.step}", error)
            num_bytes.sent += line.num_bytes
        try:
            for path in self._artifacts(run.folder):
                self.upload(path, path.relative_to(run.folder).as_posix())
        except Exception as error:
            self._report("could not upload the artifacts", error)
        try:
            self.finish(failed=self._has_failed)
        except Exception as error:
            self._report("could not end the run", error)

    def _start(self, run: RunInfo, is_closing: threading.Event) -> int | None:
        """Calls `start` until it succeeds, for the last time at the end of the run; returns None if that fails too."""
        while True:
            is_last = is_closing.is_set()
            try:
                return self.start(run)
            except Exception as error:
                self._report("could not start a run; training continues without it", error)
            if is_last:
                return None
            is_closing.wait(RETRY_SECONDS)

    def _artifacts(self, folder: Path) -> list[Path]:
        found = {path for pattern in self._patterns for path in folder.glob(pattern)}
        for pattern in self._patterns:
            if not any(folder.glob(pattern)):
                logger.warning("%s: artifacts: %s matches nothing in %s.", self.service, pattern, folder)
        return sorted(found)

    def _report(self, problem: str, error: Exception) -> None:
        self._num_errors += 1
        if self._num_errors % _ERRORS_PER_MESSAGE == 1:
            text = mask_secrets(str(error).strip()).split("\n", 1)[0]
            logger.warning("%s %s: %s: %s", self.service, problem, type(error).__name__, text)


def without_channel(image: np.ndarray) -> np.ndarray:
    """Returns an image of one channel with two dimensions, as services that use PIL need it."""
    return image[:, :, 0] if image.shape[2] == 1 else image


def _numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line, without its step. NaN and infinities are among them."""
    numbers = {name: value for name, value in values.items() if name != "step" and isinstance(value, Real)}
    return {name: value if isinstance(value, int) else float(value) for name, value in numbers.items()}


def _texts_of(values: dict[str, Any]) -> dict[str, str]:
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _unsent_lines(run: RunInfo, last_step: int, waiting: queue.Queue[LogLine | None]) -> Iterator[LogLine]:
    """Yields the lines of metrics.json that the service lacks, then new lines."""
    for line in _written_lines(run.folder / FILE_NAME):
        if last_step < line.step <= run.step:
            yield line
    while (written := waiting.get()) is not None:
        yield written


def _written_lines(path: Path) -> Iterator[LogLine]:
    """Yields the lines of metrics.json, with NaN where it has null."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                values = json.loads(text)
                step = int(values["step"])
            except (ValueError, KeyError, TypeError):
                continue  # incomplete: an earlier process was killed
            numbers = {name: float("nan") if value is None else value for name, value in values.items()}
            yield LogLine(step, _numbers_of(numbers), Media(texts=_texts_of(values)))
