"""What a run does about anomalies: stops, continues without the update, or returns to an earlier state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.anomaly.detection import Anomaly, join_ranks
from trainwright.anomaly.reports import Positions, write_bundle
from trainwright.checkpoint.contents import restore_generators
from trainwright.checkpoint.snapshot import HostBuffers, HostSnapshot
from trainwright.errors import AnomalyError, CheckpointError
from trainwright.loop.checkpointing import collect_parts, restore_checkpoint, restore_state

if TYPE_CHECKING:
    from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)


class AnomalyResponse:
    """Acts on what the watch has seen, on all ranks alike."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._section = trainer.config.anomalies
        self._watch = trainer.context.updater.watch
        self._num_anomalies = 0
        self._known: set[tuple[tuple[int, int] | None, str]] = set()
        """Those that were told of in this process, by their places of the data."""
        self._buffers = HostBuffers()
        self._snapshot: tuple[int, HostSnapshot, dict[str, float]] | None = None
        """A state in main memory: its step, its parts, and what an evaluation of that step gave."""

    @property
    def may_go_back(self) -> bool:
        """Does the config let the run go back to an earlier state?"""
        return "rollback" in (self._section.non_finite, self._section.spike)

    @property
    def is_snapshot_due(self) -> bool:
        """Is a copy of this step's state to be kept in main memory?"""
        every = self._section.snapshot_every_steps
        return self.may_go_back and every is not None and self._trainer.step % every == 0

    def take_snapshot(self) -> None:
        """Copies the state into main memory; a former copy's memory is used again."""
        trainer = self._trainer
        snapshot = self._buffers.copy_to_host(collect_parts(trainer))
        self._snapshot = (trainer.step, snapshot, dict(trainer.step_end.fresh_eval_logs))

    def note_places(self, start: int, stop: int) -> None:
        """Says from which places of the data the update that comes is made."""
        if self._watch is not None:
            self._watch.places = (start, stop)

    def went_back(self) -> bool:
        """Acts on the anomalies since the last look, which waits for the device; says whether the run went back."""
        anomalies = [] if self._watch is None else self._watch.look()
        if not anomalies:
            return False
        self._trainer.phases.enter("save", self._trainer.step)  # reading a checkpoint may take as long
        self._settle()
        for anomaly in join_ranks(self._trainer.ranks.gather(anomalies)):
            if (anomaly.places, anomaly.kind) not in self._known:  # else it is met again after going back
                self._known.add((anomaly.places, anomaly.kind))
                self._num_anomalies += 1
                self._tell(anomaly)
            self._trainer.callbacks.call("on_anomaly", anomaly)
            is_too_many = self._num_anomalies > self._section.max_anomalies
            if anomaly.policy == "raise" or is_too_many:
                raise AnomalyError(f"{anomaly.describe()}{self._count() if is_too_many else ''} {self._newest()}")
            if anomaly.policy == "rollback":
                self._go_back(anomaly)
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs to judge and count as this one."""
        watch = None if self._watch is None else self._watch.state_dict()
        return {"num_anomalies": self._num_anomalies, "watch": watch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        self._num_anomalies = int(state["num_anomalies"])
        if self._watch is not None and state["watch"] is not None:
            self._watch.load_state_dict(state["watch"])

    def _tell(self, anomaly: Anomaly) -> None:
        """Writes the bundle, says what happened, and calls the hooks."""
        trainer = self._trainer
        assert trainer.train_data is not None
        data_state = trainer.train_data.merge_states(trainer.ranks.gather(trainer.train_data.state_dict()))
        if trainer.ranks.is_first:
            path = write_bundle(
                trainer.folder,
                anomaly,
                config=trainer.config,
                data_state=data_state,
                positions=self._positions(anomaly),
                loss_history=trainer.storage.history("loss"),
                ranks=trainer.ranks,
                checkpoint_step=max(self._steps(), default=None),
            )
            logger.warning("%s %s All about it: %s", anomaly.describe(), _ACTS[anomaly.policy], path)

    def _positions(self, anomaly: Anomaly) -> Positions | None:
        if anomaly.places is None:
            return None
        assert self._trainer.train_data is not None
        return Positions(*anomaly.places, self._trainer.train_data.samples_at(*anomaly.places))

    def _count(self) -> str:
        most = self._section.max_anomalies
        return f" It is anomaly {self._num_anomalies} of this run, and anomalies.max_anomalies is {most}."

    def _settle(self) -> None:
        """Waits for the save under way: what is said, written down and gone back to is the newest checkpoint."""
        try:
            self._trainer.checkpoints.settle()
        except CheckpointError as error:  # the same on every rank; the anomaly is what the user must hear of
            logger.error("Saving failed too: %s", error)

    def _steps(self) -> list[int]:
        """Returns the committed steps; a store that does not answer now ends no run."""
        try:
            return self._trainer.context.store.steps()
        except (CheckpointError, OSError) as error:
            logger.warning("The checkpoints cannot be listed: %s", error)
            return []

    def _newest(self) -> str:
        steps = self._steps()
        if not steps:
            return "There is no checkpoint yet."
        newest = self._trainer.context.store.path(steps[-1]).name
        return f"The newest checkpoint is {newest}. To go on from it: another rate, or anomalies with skip or rollback."

    def _go_back(self, anomaly: Anomaly) -> None:
        """Brings the run to the newest state before the anomaly, and leaves the offending batches out."""
        trainer = self._trainer
        data = trainer.train_data
        assert data is not None
        assert anomaly.places is not None
        start, stop = anomaly.places
        stop += (self._section.skip_batches - 1) * data.global_batch_size
        num_anomalies = self._num_anomalies
        step = trainer.ranks.broadcast(self._newest_intact_before(anomaly.step) if trainer.ranks.is_first else None)
        if self._snapshot is not None and (step is None or self._snapshot[0] >= step):
            step, snapshot, logs = self._snapshot
            restore_state(trainer, snapshot.to_state().__getitem__, location="the copy in memory")
            trainer.step_end.recall(logs)
        elif step is not None:
            restore_checkpoint(trainer, step, keep_settings=trainer.checkpoints.keeps_settings)
        else:
            raise AnomalyError(f"{anomaly.describe()} There is no earlier state to go back to.")
        if trainer.saved_generators is not None:
            restore_generators(trainer.saved_generators)
        # Counted on from here, not from that state: else a run could meet anomalies for ever.
        self._num_anomalies = num_anomalies
        data.skip_positions(start, stop)
        trainer.is_mid_step = False
        if trainer.ranks.is_first:
            logger.warning("Went back to step %d; places %d to %d of the data are left out.", step, start, stop)
        trainer.train_loop_begin()

    def _newest_intact_before(self, step: int) -> int | None:
        store = self._trainer.context.store
        for candidate in sorted((each for each in self._steps() if each < step), reverse=True):
            try:
                store.verify(candidate)
            except (CheckpointError, OSError) as error:
                logger.warning("Not used to go back to: %s", error)
                continue
            return candidate
        return None


_ACTS = {"raise": "The run ends.", "skip": "The update was not applied.", "rollback": "The run goes back."}
