"""What becomes of a run's model on many ranks: layouts of its parameters, and what ranks say in a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainwright.config import RunConfig
from trainwright.parallel.mesh import AXES
from trainwright.planning.collectives import Collective, CollectiveRecorder, extrapolate
from trainwright.planning.fake import ImaginaryRun, imagine
from trainwright.planning.layouts import ParameterLayout, layouts_of


@dataclass(frozen=True)
class Sharding:
    """How one rank of a run takes part: what it holds, and what it sends in one step."""

    world_size: int
    rank: int
    axes: dict[str, int]
    """The axes with several ranks."""
    num_parameters: int
    """Of the whole model, all ranks together."""
    num_bytes: int
    """Of the whole model's parameters and saved buffers."""
    layouts: list[ParameterLayout]
    uncovered: list[str]
    """Parameters that no sharding rule covers; empty where there are no rules."""
    unmatched: list[str]
    """Sharding rules that match nothing."""
    micro_batch_size: int
    accumulation: int
    batch_shapes: dict[str, list[int]]
    """Of one micro-batch, by name."""
    collectives: list[Collective]
    """Of one step, the most bytes first."""

    @property
    def rank_bytes(self) -> int:
        """What this rank's part of the parameters takes."""
        return sum(each.num_bytes * each.count for each in self.layouts)

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        collectives = [asdict(each) | {"sent_bytes": round(each.sent_bytes)} for each in self.collectives]
        return asdict(self) | {"rank_bytes": self.rank_bytes, "collectives": collectives}


def plan_shards(config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None) -> Sharding:
    """Builds and steps a run on imaginary ranks, and returns what one of them holds and says."""
    with imagine(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run:
        plan = run.whole.plan
        return Sharding(
            world_size=world_size,
            rank=rank,
            axes={axis: run.mesh.sizes[axis] for axis in AXES if run.mesh.sizes[axis] > 1},
            num_parameters=run.whole.num_parameters,
            num_bytes=run.whole.saved_bytes,
            layouts=layouts_of(run.trainer.model, run.mesh),
            uncovered=[] if plan is None else list(plan.uncovered),
            unmatched=[] if plan is None else list(plan.unmatched),
            micro_batch_size=run.plan.micro_batch_size,
            accumulation=run.plan.accumulation,
            batch_shapes=run.batch_shapes(),
            collectives=record_step(run),
        )


def record_step(run: ImaginaryRun) -> list[Collective]:
    """Returns the collectives of one step of all its micro-batches; a few are run, the others are alike."""
    steps = []
    for num_micro_batches in sorted({1, run.num_micro_batches}):
        recorder = CollectiveRecorder(run.mesh)
        with recorder:
            run.step(num_micro_batches)
        steps.append(recorder.found)
    if len(steps) == 1:
        return steps[0]
    return extrapolate(*steps, num_more=run.num_micro_batches, num_micro_batches=run.plan.accumulation)
