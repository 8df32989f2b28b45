"""Asks Dynamo for what a watch cannot see: the places where a compiled forward would break into pieces.

A break at a line that the watch has noted is not repeated. Where Dynamo itself fails, that is a remark: the
eager run is right without it.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import FrameSummary
from typing import Any

import torch

from trainwright.backends.private_torch import compile_counters, explain_graph
from trainwright.checking.findings import Finding, Findings, Severity
from trainwright.loop.user_lines import Place, UserFiles
from trainwright.tracebacks import shown_path


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
            breaks = list(_breaks(forward, args, kwargs))
    except Exception as error:
        problem = f"torch.compile cannot trace this forward: {_first_line(str(error))}"
        findings.add(Finding("remark", problem, "The eager mode is not affected.", fallback))
        return
    finally:
        with contextlib.suppress(Exception):
            torch.compiler.reset()
    for reason, stack in breaks:
        place = _innermost(stack, users)
        if place is not None and str(place) in known:
            continue
        words = f"a compiled graph breaks here: {_title(reason)}"
        findings.add(Finding(severity if place is not None else "remark", words, _hint(reason), place or fallback))


def _breaks(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Iterable[FrameSummary]]]:
    """Yields each break: what Dynamo says of it, and the stack that led there."""
    counters = compile_counters()
    torch.compiler.reset()
    counters.clear()
    explained = explain_graph(forward, args, kwargs)
    for each in explained.break_reasons:
        yield str(each.reason), each.user_stack
    # A break before any operation leaves no graph to explain; it is only counted, and found by asking for one graph.
    told = {_first_line(str(each.reason)) for each in explained.break_reasons}
    counted = [str(reason) for reason in counters["graph_break"] if _first_line(str(reason)) not in told]
    if not counted:
        return
    torch.compiler.reset()
    first = _first_break(torch.compile(forward, backend="eager", fullgraph=True), args, kwargs)
    for reason in counted:
        is_first = first is not None and _first_line(str(first)) == _first_line(reason)
        yield reason, getattr(first, "real_stack", ()) if is_first else ()


def _first_break(compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        return error
    return None


def _innermost(stack: Iterable[FrameSummary], users: UserFiles) -> Place | None:
    own = [each for each in stack if each.filename in users]
    if not own:
        return None
    frame = own[-1]
    line, columns = frame.lineno or 0, None
    if frame.colno is not None and frame.end_colno is not None and frame.end_lineno == line:
        columns = (frame.colno, frame.end_colno)
    return Place(shown_path(frame.filename), line, linecache.getline(frame.filename, line).rstrip("\n"), columns)


def _title(reason: str) -> str:
    if reason.startswith("generic_jump"):
        return "a tensor decides a Python branch."
    explained = re.search(r"Explanation: (.+?)(?:\.`? (?=[A-Z])|\.?$)", reason, re.MULTILINE)
    return f"{_first_line(reason).rstrip('.')}: {explained[1].replace('`', '')}." if explained else _first_line(reason)


def _hint(reason: str) -> str:
    """Returns Dynamo's first hint that a user can act on, or our own."""
    hints = [each for each in re.findall(r"Hint: (.+)", reason) if "issue" not in each and "fundamental" not in each]
    return hints[0] if hints else "Rewrite it with torch's own operations, or move it out of forward into a hook."


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
