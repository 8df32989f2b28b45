"""What torch.compile does during a run: graphs, seconds, graph breaks and recompilations, with the user's lines."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trainwright.backends.private_torch import compile_counters
from trainwright.memory.repeated_blocks import APART
from trainwright.tracebacks import shown_path
from trainwright.user_code.locations import PACKAGE, UserFiles

_BREAKS, _RECOMPILES = "graph_breaks", "recompiles"
_LOGGERS = {
    "torch._dynamo.symbolic_convert.__graph_breaks": _BREAKS,
    "torch._dynamo.convert_frame.__graph_breaks": _BREAKS,
    "torch._dynamo.guards.__recompiles": _RECOMPILES,
}
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LOCATION = re.compile(r" in user code at (.+):(\d+)$", re.MULTILINE)
_REASON = re.compile(r"^Graph Break Reason: (.+)$", re.MULTILINE)
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)
_HINT = re.compile(r"^\s*Hint: (.+)$", re.MULTILINE)
_GUARD = re.compile(r"^\s*- \d+/\d+: (.+)$", re.MULTILINE)
_COMPILED = (PACKAGE + "compile/regions.py", PACKAGE + "memory/repeated_blocks.py")
# Hints that do not help a user, because they only say that torch does not support it.
_IDLE_HINTS = ("issue", "fundamental", "fullgraph", "TORCH_LOGS", "torch._dynamo.config", "Avoid calling")
_PREFACE = "Encountered graph break when attempting to trace"
# An evaluation runs without gradients, which is a separate graph by design.
_BY_DESIGN = "GLOBAL_STATE changed: grad_mode"
_CACHE_COUNTERS = (("aot_autograd", "autograd_cache_hit"), ("inductor", "fxgraph_cache_hit"))


@dataclass(frozen=True)
class GraphBreak:
    """A line at which a compiled forward is split into several graphs."""

    location: str
    """`file:line`, in user code if possible."""
    reason: str
    advice: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason} {self.advice}"


@dataclass(frozen=True)
class Recompilation:
    """A guard of a compiled graph that failed, and the line whose value it checks."""

    location: str
    guard: str

    def __str__(self) -> str:
        return f"{self.location}: {self.guard}"


@dataclass
class News:
    """The compilations since the last call of `take`."""

    seconds: float = 0.0
    num_graphs: int = 0
    num_cache_hits: int = 0
    breaks: list[GraphBreak] = field(default_factory=list)
    recompilations: list[Recompilation] = field(default_factory=list)


class Compilations:
    """Follows torch.compile between `begin` and `end`; `has_news` is False in steps without a compilation."""

    def __init__(self, users: UserFiles, *, forward: str = "the forward") -> None:
        """`forward` is the location of the forward, which is reported if torch provides no line."""
        self.has_news = False
        self._forward = forward
        self.breaks: dict[tuple[str, str], GraphBreak] = {}
        """Every break so far, once, by its location and reason."""
        self._users = users
        self._news = News()
        self._ears: list[tuple[logging.Logger, _Ear]] = []
        self._started: float | None = None
        self._counted = (0, 0)

    def begin(self) -> None:
        """Begins to listen."""
        from torch._dynamo.callback import callback_handler

        if self._ears:
            return
        # Read before the first listener enables torch's records.
        wanted = set(torch._logging._internal.log_state.artifact_names)
        for name, what in _LOGGERS.items():
            hear = self._hear_break if what == _BREAKS else self._hear_recompilation
            ear = _Ear(logging.getLogger(name), what, hear, was_wanted=what in wanted)
            self._ears.append((logging.getLogger(name), ear))
        callback_handler.register_start_callback(self._begin_compilation)
        callback_handler.register_end_callback(self._end_compilation)

    @property
    def is_listening(self) -> bool:
        """True between `begin` and `end`."""
        return bool(self._ears)

    def end(self) -> None:
        """Stops listening, and restores torch's loggers."""
        from torch._dynamo.callback import callback_handler

        if not self._ears:
            return
        for _, ear in reversed(self._ears):
            ear.close()
        self._ears = []
        # torch._dynamo.reset() forgets callbacks by itself.
        if self._begin_compilation in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._begin_compilation)
            callback_handler.remove_end_callback(self._end_compilation)

    def take(self) -> News:
        """Returns what happened since the last call."""
        news, self._news, self.has_news = self._news, News(), False
        return news

    def break_of(self, error: Exception) -> GraphBreak:
        """Returns the break that an exception of Dynamo describes."""
        text = str(error)
        stack = [(each.filename, each.lineno or 0) for each in getattr(error, "real_stack", None) or ()]
        return GraphBreak(self._location_of(stack) or self._forward, *_words(text.strip()))

    def _begin_compilation(self, *_: Any) -> None:
        self._started, self._counted = time.perf_counter(), _count()

    def _end_compilation(self, *_: Any) -> None:
        if self._started is None:
            return
        news = self._news
        news.seconds += time.perf_counter() - self._started
        graphs, hits = (max(now - then, 0) for now, then in zip(_count(), self._counted, strict=True))
        news.num_graphs += graphs
        news.num_cache_hits += hits
        self._started, self.has_news = None, True

    def _hear_break(self, text: str) -> None:
        found = _REASON.search(text)
        reason = text[found.start(1) :] if found else text
        if APART in reason:
            return  # `keep_apart` of memory/repeated_blocks.py: intended
        match = _LOCATION.search(text)
        stack = [(file, int(line)) for file, line in _FRAME.findall(text)]
        location = self._location_of(stack) or (f"{shown_path(match[1])}:{match[2]}" if match else self._forward)
        graph_break = GraphBreak(location, *_words(reason))
        # A function with a break is traced again piece by piece, and reports the same break each time.
        if (location, graph_break.reason) not in self.breaks:
            self.breaks[location, graph_break.reason] = graph_break
            self._news.breaks.append(graph_break)
        self.has_news = True

    def _hear_recompilation(self, text: str) -> None:
        found = _GUARD.search(text)
        guard = (found[1] if found else text.strip().splitlines()[0]).split("  # ")[0].strip()
        if guard == _BY_DESIGN:
            return
        stack = [(file, int(line)) for file, line in _FRAME.findall(text)]
        self._news.recompilations.append(Recompilation(self._location_of(stack) or self._forward, guard))
        self.has_news = True

    def _location_of(self, stack: Iterable[tuple[str, int]]) -> str | None:
        """Returns the innermost line of user code inside the compiled region."""
        found = None
        for file, line in stack:
            if file in _COMPILED:
                found = None  # the outer frames are the script that calls train()
            elif file in self._users:
                found = f"{shown_path(file)}:{line}"
        return found


class _Ear(logging.Filter):
    """Receives the records of one of torch's loggers, and forwards them only if they were enabled before."""

    def __init__(self, source: logging.Logger, artifact: str, hear: Any, *, was_wanted: bool) -> None:
        super().__init__()
        self._source, self._artifact, self._hear, self._was_wanted = source, artifact, hear, was_wanted
        self._level = source.level
        if not was_wanted:
            # torch calls this before it writes a record.
            torch._logging._internal.log_state.artifact_names.add(artifact)
            source.setLevel(logging.DEBUG)
        source.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Receives a record."""
        self._hear(record.getMessage())
        return self._was_wanted

    def close(self) -> None:
        """Restores the logger."""
        self._source.removeFilter(self)
        if not self._was_wanted:
            self._source.setLevel(self._level)
            torch._logging._internal.log_state.artifact_names.discard(self._artifact)


@contextmanager
def listening(compilations: Compilations) -> Iterator[Compilations]:
    """Listens inside the block; does nothing if the object is listening already."""
    if compilations.is_listening:
        yield compilations
        return
    compilations.begin()
    try:
        yield compilations
    finally:
        compilations.end()


def _count() -> tuple[int, int]:
    """Returns the numbers of graphs and of cache hits in this process so far."""
    counters = compile_counters()
    hits = sum(counters[group][name] for group, name in _CACHE_COUNTERS if group in counters)
    return counters["stats"]["unique_graphs"], hits


def _words(reason: str) -> tuple[str, str]:
    """Returns Dynamo's reason for a break in one sentence, and what to do."""
    lines = [line.strip() for line in reason.splitlines() if line.strip() and not line.startswith(_PREFACE)]
    first = lines[0].rstrip(".") if lines else "no reason given"
    if first.startswith("generic_jump"):
        first = "a tensor decides a Python branch"
    explained = _EXPLANATION.search(reason)
    sentence = f"{first}: {explained[1].strip().rstrip('.').replace('`', '')}." if explained else f"{first}."
    hints = [each for each in _HINT.findall(reason) if not any(word in each for word in _IDLE_HINTS)]
    return sentence, hints[0] if hints else "Use torch's own operations, or move it into a hook."
