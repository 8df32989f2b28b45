"""Asks Dynamo for what a watch cannot see: the places where a compiled forward would break into pieces.

A break at a line that the watch has noted is not repeated. Where Dynamo itself fails, that is a remark: the
eager run is right without it.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

import torch

from trainwright.checking.findings import Finding, Findings, Place, Severity
from trainwright.checking.places import UserFiles
from trainwright.config.tree import shown_path


def check_trace(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    users: UserFiles,
    severity: Severity,
    noted: Iterable[str],
    fallback: Place | None,
    findings: Findings,
) -> None:
    """Notes each break of the graph of `forward` on a real batch; `noted` are the lines to leave out."""
    known = set(noted)
    try:
        # What the user prints was printed by the eager pass already.
        with _quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            torch._dynamo.reset()
            explained = torch._dynamo.explain(forward)(*args, **kwargs)
    except Exception as error:
        problem = f"torch.compile cannot trace this forward: {_first_line(str(error))}"
        findings.add(Finding("remark", problem, "The eager mode is not affected.", fallback))
        return
    finally:
        with contextlib.suppress(Exception):
            torch._dynamo.reset()
    for reason in explained.break_reasons:
        place = _innermost(reason.user_stack, users)
        if place is not None and str(place) in known:
            continue
        words = f"a compiled graph breaks here: {_first_line(str(reason.reason))}"
        advice = "Rewrite it with torch's own operations, or move it out of forward into a hook."
        findings.add(Finding(severity if place is not None else "remark", words, advice, place or fallback))


def _innermost(stack: Iterable[FrameSummary], users: UserFiles) -> Place | None:
    own = [each for each in stack if each.filename in users]
    if not own:
        return None
    frame = own[-1]
    line, columns = frame.lineno or 0, None
    if frame.colno is not None and frame.end_colno is not None and frame.end_lineno == line:
        columns = (frame.colno, frame.end_colno)
    return Place(shown_path(frame.filename), line, linecache.getline(frame.filename, line).rstrip("\n"), columns)


def _first_line(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "no reason given")
    return line if line[-1] in ".!?" else f"{line}."


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Dynamo's own log off the terminal."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
