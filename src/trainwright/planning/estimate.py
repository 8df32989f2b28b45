"""Predicts the memory of one rank and the disk of one checkpoint, by stepping the run where nothing has memory.

What is counted is every tensor of a real step: forward, backward, collectives, update. What is not is what no tensor
holds: the driver's and the collectives' own memory (about 1 to 2 GB on a GPU), and gaps in the allocator's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trainwright.backends.private_torch import tree_leaves
from trainwright.config import RunConfig
from trainwright.memory.micro_batch import HEADROOM
from trainwright.parallel.local import local
from trainwright.parallel.mesh import AXES
from trainwright.planning import held_bytes
from trainwright.planning.fake import ImaginaryRun, imagine
from trainwright.planning.held_bytes import HeldBytes

AVERAGES = "averaged weights"
_GROWING = (held_bytes.ACTIVATIONS, held_bytes.TEMPORARY, held_bytes.BATCH)
"""What grows with the micro-batch, more or less in proportion."""


@dataclass(frozen=True)
class Estimate:
    """What one rank of a run needs, in bytes."""

    world_size: int
    rank: int
    axes: dict[str, int]
    micro_batch_size: int
    accumulation: int
    batch_shapes: dict[str, list[int]]
    num_parameters: int
    most: dict[str, int]
    """The most of each kind that is held at any time of a step; not all at once."""
    at_peak: dict[str, int]
    """What is held when most is."""
    checkpoint_bytes: int
    """On disk, all ranks together."""
    remarks: list[str]

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return sum(self.at_peak.values())

    def fits(self, memory: int) -> bool:
        """Would it fit a device of so many bytes, with some room left for what is not counted?"""
        return self.peak_bytes <= (1.0 - HEADROOM) * memory

    def largest_micro_batch(self, memory: int) -> int:
        """Returns about how many samples of this shape would fit; 0: not even one."""
        growing = sum(self.at_peak[kind] for kind in _GROWING) / self.micro_batch_size
        fixed = self.peak_bytes - growing * self.micro_batch_size
        return max(int(((1.0 - HEADROOM) * memory - fixed) / growing), 0) if growing else 0

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain values, for JSON."""
        return asdict(self) | {"peak_bytes": self.peak_bytes}


def estimate(config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None) -> Estimate:
    """Builds and steps a run on imaginary ranks, and returns what one of them needs."""
    with imagine(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run:
        watch = watch_step(run)
        averages = _average_bytes(run)
        shared = {AVERAGES: averages} if averages else {}
        return Estimate(
            world_size=world_size,
            rank=rank,
            axes={axis: run.mesh.sizes[axis] for axis in AXES if run.mesh.sizes[axis] > 1},
            micro_batch_size=run.plan.micro_batch_size,
            accumulation=run.plan.accumulation,
            batch_shapes=run.batch_shapes(),
            num_parameters=run.whole.num_parameters,
            most=watch.most | shared,
            at_peak=watch.peak | shared,
            checkpoint_bytes=_checkpoint_bytes(run),
            remarks=_remarks(run),
        )


def watch_step(run: ImaginaryRun) -> HeldBytes:
    """Runs a first step, in which optimizers make their states, then watches a second one."""
    trainer, watch = run.trainer, HeldBytes()
    parameters = list(trainer.model.parameters())
    with _marked_forwards(run, watch), watch:
        watch.name(parameters, held_bytes.PARAMETERS)
        watch.name(trainer.model.buffers(), held_bytes.BUFFERS)
        watch.name(tree_leaves(run.batch), held_bytes.BATCH)
        run.step(1)
        watch.name(states_of(run), held_bytes.STATES)
        watch.begin_peak()
        run.step()
        watch.name([each.grad for each in parameters if each.grad is not None], held_bytes.GRADIENTS)
    return watch


def states_of(run: ImaginaryRun) -> list[torch.Tensor]:
    """Returns the tensors that the optimizers keep from step to step."""
    states = [dict(state) for each in run.trainer.optimizers.values() for state in each.state.values()]
    return [each for each in tree_leaves(states) if isinstance(each, torch.Tensor)]


@contextmanager
def _marked_forwards(run: ImaginaryRun, watch: HeldBytes) -> Iterator[None]:
    """Tells the watch when forwards begin and end, and which tensors are gradients."""
    trainer = run.trainer
    parameters = list(trainer.model.parameters())
    inner: Callable[[Any], Any] = trainer.run_forward

    def run_forward(batch: Any) -> Any:
        watch.name([each.grad for each in parameters if each.grad is not None], held_bytes.GRADIENTS)
        with watch.forward():
            return inner(batch)

    def note(parameter: torch.Tensor) -> None:
        watch.name([parameter.grad], held_bytes.GRADIENTS)

    trained: list[Any] = [each for each in parameters if each.requires_grad]
    hooks = [each.register_post_accumulate_grad_hook(note) for each in trained]
    trainer.run_forward = run_forward  # type: ignore[method-assign]
    if run.mesh.size("pipeline") > 1:  # whose schedule calls the model itself
        forwards = ExitStack()

        def begin(*_: Any) -> None:
            forwards.enter_context(watch.forward())

        def end(*_: Any) -> None:
            forwards.close()

        hooks += [trainer.model.register_forward_pre_hook(begin), trainer.model.register_forward_hook(end)]
    try:
        yield
    finally:
        del trainer.run_forward  # the class's own is there again
        for hook in hooks:
            hook.remove()


def _average_bytes(run: ImaginaryRun) -> int:
    """What hooks keep of the weights, in fp32 at least."""
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    weights = [local(each) for each in run.trainer.model.parameters() if each.is_floating_point()]
    return copies * sum(each.numel() * max(each.element_size(), 4) for each in weights)


def _checkpoint_bytes(run: ImaginaryRun) -> int:
    """Everything of parameters' shape that is saved: weights, optimizer states, averages, over all ranks once."""
    own = sum(each.numel() * each.element_size() for each in run.trainer.model.parameters())
    states = sum(each.numel() * each.element_size() for each in states_of(run))  # of a DTensor: the whole
    share = run.whole.parameter_bytes / own if own else 1.0  # a pipeline's stage holds some of the layers
    copies = sum(getattr(hook, "copies_of_weights", 0) for hook in run.trainer.hooks)
    return round(run.whole.saved_bytes + states * share + copies * 4 * run.whole.num_parameters)


def _remarks(run: ImaginaryRun) -> list[str]:
    found = []
    if run.config.trainer.micro_batch_size == "auto":
        found.append("micro_batch_size is auto: counted with the rank's whole batch in one forward.")
    reserved = {} if run.config.model is None else run.config.model.reserved
    if "offload" in reserved:
        found.append("model.offload is not counted: the tensors that it names are counted as if they stayed.")
    if run.mesh.size("pipeline") > 1:
        found.append("Stages of a pipeline differ: see the first rank of another with --rank.")
    if run.config.runtime.mode != "eager":
        found.append(f"Counted as in mode eager; {run.config.runtime.mode} usually needs less.")
    return found
