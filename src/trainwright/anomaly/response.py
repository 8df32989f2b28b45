"""The response to anomalies: counts and reports them, and finds the state that a rollback restores.

Detection is in detection.py; the trainer calls the hooks and restores the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainwright.anomaly.detection import Anomaly, AnomalyDetector, join_ranks
from trainwright.anomaly.reports import Positions, write_report
from trainwright.checkpoint.contents import has_only_weights
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.checkpoint.snapshot import HostBuffers, HostSnapshot
from trainwright.config import AnomaliesSection, RunConfig
from trainwright.errors import AnomalyError, CheckpointError
from trainwright.parallel.collectives import Ranks

logger = logging.getLogger(__name__)

_ACTIONS = {"raise": "The run ends.", "skip": "The update was skipped.", "rollback": "The run rolls back."}


class StateSnapshot(NamedTuple):
    """A copy of the state in host memory."""

    step: int
    parts: HostSnapshot
    eval_logs: dict[str, float]
    """The logs of an evaluation of that step."""


class AnomalyResponse:
    """The anomalies of a run; the same on every rank."""

    def __init__(
        self,
        section: AnomaliesSection,
        detector: AnomalyDetector | None,
        *,
        ranks: Ranks,
        folder: Path,
        store: AnyStore,
    ) -> None:
        self._section = section
        self._detector = detector
        self._ranks = ranks
        self._folder = folder
        self._store = store
        self.num_anomalies = 0
        self._known: set[tuple[tuple[int, int] | None, str]] = set()
        """Those that this process has reported, by their positions in the data."""
        self._buffers = HostBuffers()
        self.snapshot: StateSnapshot | None = None

    @property
    def may_roll_back(self) -> bool:
        """True if a policy restores an earlier state."""
        return "rollback" in (self._section.non_finite, self._section.spike)

    def is_snapshot_due(self, step: int) -> bool:
        """Returns True if a copy of this step's state should be kept in host memory."""
        every = self._section.snapshot_every_steps
        return self.may_roll_back and every is not None and step % every == 0

    def take_snapshot(self, step: int, parts: Mapping[str, Any], eval_logs: Mapping[str, float]) -> None:
        """Copies the state to host memory, into the memory of the previous copy."""
        self.snapshot = StateSnapshot(step, self._buffers.copy_to_host(parts), dict(eval_logs))

    def find(self) -> list[Anomaly]:
        """Returns the anomalies since the last call, joined over ranks; waits for the device."""
        found = [] if self._detector is None else self._detector.look()
        return join_ranks(self._ranks.gather(found)) if found else []

    def count_if_new(self, anomaly: Anomaly) -> bool:
        """Counts an anomaly; returns False for one that occurs again after a rollback."""
        key = (anomaly.positions, anomaly.kind)
        if key in self._known:
            return False
        self._known.add(key)
        self.num_anomalies += 1
        return True

    def report(
        self,
        anomaly: Anomaly,
        *,
        config: RunConfig,
        data_state: Mapping[str, Any],
        samples: Sequence[int] | None,
        loss_history: Sequence[tuple[int, float]],
    ) -> None:
        """Writes the report folder and logs the anomaly; one rank calls it."""
        path = write_report(
            self._folder,
            anomaly,
            config=config,
            data_state=data_state,
            positions=None if anomaly.positions is None else Positions(*anomaly.positions, samples),
            loss_history=loss_history,
            ranks=self._ranks,
            checkpoint_step=max(self._steps(), default=None),
        )
        logger.warning("%s %s Report: %s", anomaly.describe(), _ACTIONS[anomaly.policy], path)

    def raise_if_fatal(self, anomaly: Anomaly) -> None:
        """Raises if the policy is `raise`, or if there were too many anomalies."""
        limit = self._section.max_anomalies
        is_too_many = self.num_anomalies > limit
        if anomaly.policy != "raise" and not is_too_many:
            return
        count = f" It is anomaly {self.num_anomalies} of this run, and anomalies.max_anomalies is {limit}."
        steps = self._steps()
        newest = "There is no checkpoint yet."
        if steps:
            newest = (
                f"The newest checkpoint is {self._store.path(steps[-1]).name}. To continue from it, change the "
                "learning rate, or set anomalies to skip or rollback."
            )
        raise AnomalyError(f"{anomaly.describe()}{count if is_too_many else ''} {newest}")

    def newest_intact_before(self, step: int) -> int | None:
        """Returns the newest intact checkpoint before a step; one rank calls it."""
        for candidate in sorted((each for each in self._steps() if each < step), reverse=True):
            try:
                self._store.verify(candidate)
                if has_only_weights(self._store, candidate):
                    continue
            except (CheckpointError, OSError) as error:
                logger.warning("Not used for the rollback: %s", error)
                continue
            return candidate
        return None

    def positions_to_skip(self, anomaly: Anomaly, stop_of: Callable[[int], int]) -> tuple[int, int]:
        """Returns the range of data positions that the run skips after a rollback.

        `stop_of` returns where the batch that begins at a position ends.
        """
        assert anomaly.positions is not None
        start, stop = anomaly.positions
        for _ in range(self._section.skip_batches - 1):
            stop = stop_of(stop)
        return start, stop

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge and count equally."""
        detector = None if self._detector is None else self._detector.state_dict()
        return {"num_anomalies": self.num_anomalies, "detector": detector}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self.num_anomalies = int(state["num_anomalies"])
        if self._detector is not None and state["detector"] is not None:
            self._detector.load_state_dict(state["detector"])

    def _steps(self) -> list[int]:
        """Returns the committed steps; a store that does not answer does not end the run."""
        try:
            return self._store.steps()
        except (CheckpointError, OSError) as error:
            logger.warning("The checkpoints cannot be listed: %s", error)
            return []
