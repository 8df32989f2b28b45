"""The story of a check: the config, its components, then a trial of everything, and one report of all findings."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainwright.checking.explain import Case
from trainwright.checking.findings import Findings
from trainwright.checking.report import Report
from trainwright.checking.settings import check_components, load_config
from trainwright.checking.trial import try_out
from trainwright.loop.user_lines import UserFiles

TRIALS = ("components", "building every part", "a training step", "evaluation", "a checkpoint", "graph safety")


def check_run(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Report:
    """Checks the run that a YAML file describes, without touching its run folder."""
    findings = Findings()
    report = Report(findings)
    config = load_config(path, overrides, findings)
    if config is None:
        report.skipped += TRIALS
        return report
    report.checked.append("config")
    case = Case(config, UserFiles(config.project_dir), findings)
    with _quiet():
        num_components = check_components(case)
        if findings.count("error"):
            report.skipped += TRIALS[1:]
            return report
        report.checked.append(f"{num_components} components")
        with tempfile.TemporaryDirectory(prefix="trainwright-check-") as folder:
            try_out(case, Path(folder), report)
    return report


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the run's own log out of the report, and what the user's code prints beside it, on stderr."""
    package = logging.getLogger("trainwright")
    level = package.level
    package.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        package.setLevel(level)
