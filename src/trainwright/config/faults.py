"""The sections that say what happens when something goes wrong: incidents, preemption, hangs.

Who acts on them: loop/incidents.py, hooks/obey_preemption.py, hooks/watch_for_hangs.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainwright.config.sections import Count, Positive, Section


class IncidentsSection(Section):
    """What an update does whose loss or gradient is not finite, or far from those before it."""

    non_finite: Literal["raise", "skip", "rollback"] = "raise"
    """A loss or gradient norm that is nan or infinite: ends the run, is not applied, or is undone."""
    spike: Literal["ignore", "raise", "skip", "rollback"] = "ignore"
    """A loss far above those of the steps before: ignored, ends the run, is not applied, or is undone."""
    spike_window: Annotated[Count, Field(ge=8)] = 100
    """Good steps whose losses a spike is measured against; a quarter of them, at least five, must be there."""
    spike_threshold: Positive = 10.0
    """How many robust standard deviations above the window's median a loss is a spike."""
    max_incidents: Count = 10
    """Updates that may be skipped or undone before the run ends after all."""
    skip_batches: Count = 1
    """Batches that are left out after an undone update: the offending one and those after it."""
    snapshot_every_steps: Count | None = None
    """Steps between copies of the state in main memory, to go back to; None: back to the newest checkpoint."""


class PreemptionSection(Section):
    """How the run leaves when it is told to: by SIGTERM, SIGUSR1 or Ctrl-C, to any one rank."""

    deadline_seconds: Positive = 25.0
    """Seconds from SIGTERM or SIGUSR1 until the process leaves without saving, if no step's end came meanwhile.
    Clusters commonly kill after 30."""
    requeue: bool = False
    """Whether a SLURM job that was told to leave asks to be queued again, by `scontrol requeue`."""


class HangsSection(Section):
    """When a rank that does not move is taken for stuck; a report is written and the run leaves."""

    watch: bool = True
    """Whether anybody looks."""
    factor: Positive = 20.0
    """Stuck is a phase that takes so many times its median."""
    min_seconds: Positive = 600.0
    """No phase is stuck before so many seconds, whatever its median."""
