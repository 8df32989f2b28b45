"""Pipeline parallelism: which layers each stage keeps, and the schedule that runs micro-batches through the stages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.parallel.mesh import Mesh, named_tensors, own_gradient

logger = logging.getLogger(__name__)

PARTS = ("begin", "hidden_shape", "beside", "finish")
"""The methods that say what `forward` does, beside the blocks."""


class Stage(NamedTuple):
    """What of a model one rank has: the blocks of these numbers, and the parameters that the other end has too."""

    number: int
    num_stages: int
    blocks: range
    tied: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """Does it begin, from the batch?"""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Does it finish, with the loss?"""
        return self.number == self.num_stages - 1


def reject_pipeline(model: nn.Module, num_stages: int, *, own_parts: Sequence[str] = (), where: Any = None) -> None:
    """Rejects a model that cannot be cut into so many stages, or a run whose own code would not be called.

    `own_parts` names what a user wrote of the step (`MyTrainer.train_step`), which the schedule of the stages replaces.
    """
    asked = f"runtime.mesh.pipeline is {num_stages}, but"
    kind = type(model)
    path = getattr(model, "blocks", None)
    if own_parts:
        raise ConfigError(
            f"{asked} {', '.join(own_parts)} would not be called: the stages' schedule runs forward and backward by "
            "itself. Leave out pipeline (data and tensor split a model too), or these methods.",
            where=where,
        )
    if not isinstance(path, str):
        raise ConfigError(
            f"{asked} {kind.__name__} is not made of blocks that follow each other: it names none in `blocks`. "
            "Use llama, gpt2, bert or vit, or split it along fsdp or tensor instead.",
            where=where,
        )
    owner = _owner(kind, "forward")
    others = [name for name in ("blocks", *PARTS) if _owner(kind, name) is not owner]
    if others:
        raise ConfigError(
            f"{asked} {owner.__name__}.forward and {_owner(kind, others[0]).__name__}.{others[0]} are of different "
            f"classes, so that stages would compute something else than forward. Let one class have forward, blocks, "
            f"{', '.join(PARTS)}, or leave out pipeline.",
            where=where,
        )
    num_blocks = len(_blocks_of(model))
    if num_blocks < num_stages:
        raise ConfigError(
            f"{asked} {kind.__name__} has {num_blocks} blocks ({path}): each stage needs one. Use at most "
            f"{num_blocks} stages, or more layers.",
            where=where,
        )
    for name in _outer_names(path):
        around = model.get_submodule(name)
        if around._forward_hooks or around._forward_pre_hooks:
            raise ConfigError(
                f"{asked} {name} has hooks on its forward, which no stage calls. Put them on the blocks instead.",
                where=where,
            )


def split_layers(model: nn.Module, mesh: Mesh) -> None:
    """Keeps in place what this rank's stage needs; everything else becomes an empty module or None.

    From then on `model(hidden, batch)` runs this stage: the first ignores `hidden`, the last returns the outputs.
    A weight that the first and the last stage share (tied embeddings) stays on both, under the same name.
    """
    num_stages, number = mesh.size("pipeline"), mesh.rank("pipeline")
    reject_pipeline(model, num_stages)
    stages = stages_of(model, num_stages)
    at_both_ends = tuple(name for name, having in stages.items() if len(having) > 1)
    share = _deal(len(_blocks_of(model)), num_stages)[number]
    _let_go(model, "", lambda name: number in stages[name])
    stage: Any = Stage(number, num_stages, share, at_both_ends)
    model.stage = stage
    # Bound, so that a copy of the model runs itself; called through the model, so that hooks on it (FSDP's) run.
    model.forward = MethodType(_run_stage, model)


def stages_of(model: nn.Module, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Returns which stages have each parameter and buffer of a model that is still whole, under all of its names."""
    shares = _deal(len(_blocks_of(model)), num_stages)
    homes = {name: _home(name, model, shares) for name, _ in named_tensors(model)}
    tied = _tied_names(model, homes)
    last = num_stages - 1
    return {name: tuple(sorted({home, last})) if name in tied else (home,) for name, home in homes.items()}


def mark_shared(model: nn.Module) -> None:
    """Leaves on each parameter that both ends have, as `num_stages`, how many stages count it in a sum over stages.

    For a model that is split in every way already: splitting makes other parameters.
    """
    stage: Any = model.stage
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in stage.tied:
        if name in own:
            own[name].num_stages = 2  # type: ignore[attr-defined]  # a mark, as lr_scale is


def _run_stage(model: Any, hidden: Tensor | None, batch: Mapping[str, Any], *, only_begins: bool = False) -> Any:
    """Runs what this rank has of the model, in place of its forward."""
    stage: Stage = model.stage
    if stage.is_first:
        hidden = model.begin(**batch)
    if only_begins:
        return hidden
    beside = model.beside(**batch)
    blocks = _blocks_of(model)
    for number in stage.blocks:
        hidden = blocks[number](hidden, *beside)
    return model.finish(hidden, **batch) if stage.is_last else hidden


def _blocks_of(model: Any) -> nn.ModuleList:
    blocks: nn.ModuleList = model.get_submodule(model.blocks)
    return blocks


def _deal(num_blocks: int, num_stages: int) -> list[range]:
    """Deals blocks out evenly and in order; the first stages have one more, for the last has the head."""
    few, rest = divmod(num_blocks, num_stages)
    starts = [number * few + min(number, rest) for number in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _home(name: str, model: Any, shares: Sequence[range]) -> int:
    """Returns the stage that needs a parameter or buffer."""
    if _is_within(name, model.blocks):
        number = int(name.removeprefix(f"{model.blocks}.").partition(".")[0])
        return next(stage for stage, share in enumerate(shares) if number in share)
    is_before = any(_is_within(name, part) for part in model.parts_before_blocks)
    return 0 if is_before else len(shares) - 1


def _tied_names(model: Any, homes: Mapping[str, int]) -> set[str]:
    """Returns all names of the weights that both ends need; rejects weights that blocks of several stages share."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    tied: set[str] = set()
    for shared in names.values():
        if len({homes[name] for name in shared}) == 1:
            continue
        if any(_is_within(name, model.blocks) for name in shared):
            raise ConfigError(
                f"runtime.mesh.pipeline: {' and '.join(shared)} are one weight, but belong to different stages. Only "
                "what comes before and after the blocks may be shared. Use fewer stages, or weights of their own."
            )
        tied.update(shared)
    return tied


def _let_go(module: nn.Module, prefix: str, keeps: Callable[[str], bool]) -> None:
    """Empties what holds nothing that is kept, from the outside in."""
    for name, child in module._modules.items():
        kept = [keeps(f"{prefix}{name}.{each}") for each, _ in named_tensors(child)] if child is not None else []
        if child is None or all(kept):
            continue
        if any(kept):
            _let_go(child, f"{prefix}{name}.", keeps)
        else:
            module._modules[name] = nn.Identity()
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and not keeps(f"{prefix}{name}"):
                held[name] = None  # as register_parameter(name, None) does


def _owner(kind: type[Any], name: str) -> type[Any]:
    """Returns the class that defines an attribute of a class; the shipped classes in a hierarchy count as one."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), object)
    shipped = [each for each in kind.__mro__ if each.__module__.startswith("trainwright.models.")]
    return shipped[0] if owner in shipped else owner


def _outer_names(path: str) -> list[str]:
    """Returns the paths of the modules around the blocks, without the model itself: a.b.c → a, a.b, a.b.c."""
    parts = path.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _is_within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


__all__ = ["Pipeline", "reject_pipeline", "split_layers"]

TRAVELLING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that hidden states may have on their way."""

Batch = Mapping[str, Any]
Scale = Callable[[Any, int], Tensor]


class Hidden(NamedTuple):
    """The shape and the dtype of the hidden states that travel from stage to stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pipeline:
    """The stages of one model, of which this rank runs one. All ranks of a pipeline call the same verbs together.

    `tied` are the parameters that the first and the last stage both hold, each with the group in which the two meet;
    on stages between there are none. Their gradients are parts of one sum (`sum_tied_gradients`), and count once in a
    norm.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, num_micro_batches: int, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._group = mesh.group("pipeline")
        stage: Any = model.stage
        self._stage: Stage = stage
        self._part = _StageModule(model, self._stage)
        self._dtypes: dict[torch.dtype | None, torch.dtype] = {}
        self._schedules: dict[tuple[int, bool], tuple[PipelineScheduleSingle, _RaggedStage]] = {}
        self._known_keys: set[frozenset[str]] = set()
        self.tied = self._find_tied()
        idle = (self._stage.num_stages - 1) / (num_micro_batches + self._stage.num_stages - 1)
        logger.info(
            "pipeline: %d stages and %d micro-batches an update: each rank is idle for %d %% of a step.",
            self._stage.num_stages,
            num_micro_batches,
            round(100 * idle),
        )

    def run(self, micro_batches: Sequence[Batch], scale: Scale) -> None:
        """Runs forward and backward of all micro-batches; gradients add up in `.grad`.

        On the last stage `scale(outputs, number)` is called once for each micro-batch, in order, with what the model
        returned for it; it returns the number to propagate. The outputs are not kept: all logits of an update would
        not fit. Micro-batches may differ in shape; what a rank does when depends on their number alone.
        """
        self._step(micro_batches, scale, has_backward=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Any:
        """Returns the model's outputs for a batch on the last stage, None on the others; without gradients."""
        self._step([batch], None, has_backward=False)
        return self._part.take_outputs()

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Adds up what both ends know of the gradients of shared weights; after the last backward, before the norm."""
        ranks = dist.get_process_group_ranks(self._group)
        other_end = ranks[-1] if self._stage.is_first else ranks[0]
        for parameter, group in self.tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = own_gradient(parameter)
            assert gradient is not None
            gradient_there = torch.empty_like(gradient)
            # Both ends add the same two numbers, so that their weights stay equal bit for bit.
            sending = dist.P2POp(dist.isend, gradient, other_end, group)
            receiving = dist.P2POp(dist.irecv, gradient_there, other_end, group)
            for work in dist.batch_isend_irecv([sending, receiving]):
                work.wait()
            gradient += gradient_there

    def _find_tied(self) -> list[tuple[nn.Parameter, Any]]:
        if not (self._stage.is_first or self._stage.is_last):
            return []
        own = dict(self._model.named_parameters(remove_duplicate=False))
        tied = {id(own[name]): own[name] for name in self._stage.tied}
        return [(parameter, self._group) for parameter in tied.values() if parameter.requires_grad]

    def _hidden_of(self, micro_batch: Batch) -> Hidden:
        keys = frozenset(micro_batch)
        if keys not in self._known_keys:
            _reject_other_keys(self._model, micro_batch)
            self._known_keys.add(keys)
        kind = self._device.type
        # What decides about the dtype; the same on every rank at the same time.
        circumstances = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if circumstances not in self._dtypes:
            self._dtypes[circumstances] = self._learn_dtype(micro_batch)
        return Hidden(tuple(self._model.hidden_shape(**micro_batch)), self._dtypes[circumstances])

    def _learn_dtype(self, micro_batch: Batch) -> torch.dtype:
        """Returns the dtype of hidden states, which only the first stage sees, by running its beginning once.

        All ranks of the run do this at the same time, at the first batch: on a split model it is collective.
        """
        number = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._stage.is_first:
            hidden = self._begin(micro_batch)
            expected = self._model.hidden_shape(**micro_batch)
            if tuple(hidden.shape) != tuple(expected) or hidden.dtype not in TRAVELLING:
                raise TrainwrightError(
                    f"{type(self._model).__name__}.begin returned {hidden.dtype} {list(hidden.shape)}, but its "
                    f"hidden_shape says {list(expected)}. Let both agree, in one of {', '.join(map(str, TRAVELLING))}."
                )
            number.fill_(TRAVELLING.index(hidden.dtype))
        dist.broadcast(number, src=dist.get_global_rank(self._group, 0), group=self._group)
        return TRAVELLING[int(number)]

    @torch.no_grad()
    def _begin(self, micro_batch: Batch) -> Tensor:
        """Returns the hidden states that the first block gets; leaves random generators alone."""
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()  # dropout would draw
        try:
            return cast(Tensor, self._model(None, micro_batch, only_begins=True))
        finally:
            for module in training:
                module.training = True

    def _step(self, micro_batches: Sequence[Batch], scale: Scale | None, *, has_backward: bool) -> None:
        """Lets torch's schedule run the micro-batches."""
        schedule, stage = self._schedule(len(micro_batches), has_backward=has_backward)
        stage.expected = [self._hidden_of(micro_batch) for micro_batch in micro_batches]
        self._part.begin(micro_batches, scale, stage.expected)
        numbers = torch.arange(len(micro_batches))  # the schedule cuts this into one number a micro-batch
        try:
            schedule.step(number=numbers, target=numbers if has_backward else None)
        except RuntimeError as error:
            # torch wraps what the model raised, which may be an error in words or out of memory.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            self._part.end()
            stage.clear_runtime_states()

    def _schedule(self, num_micro_batches: int, *, has_backward: bool) -> tuple[PipelineScheduleSingle, _RaggedStage]:
        """Returns the schedule of so many micro-batches, with this rank's stage of it."""
        key = num_micro_batches, has_backward
        if key not in self._schedules:
            travelling = torch.empty(0, device="meta", requires_grad=has_backward)  # stands for any shape
            stage = _RaggedStage(
                self._part,
                self._stage.number,
                self._stage.num_stages,
                self._device,
                input_args=() if self._stage.is_first else (travelling,),
                output_args=(torch.empty(1, device="meta") if self._stage.is_last else travelling,),
                group=self._group,
            )
            kind = Schedule1F1B if has_backward and num_micro_batches >= self._stage.num_stages else ScheduleGPipe
            loss = _given if has_backward else None
            self._schedules[key] = kind(stage, num_micro_batches, loss_fn=loss, scale_grads=False), stage
        return self._schedules[key]


class _RaggedStage(PipelineStage):
    """A stage that makes room for each micro-batch when it comes, so that they may differ in shape.

    Were they run by one shape after the other, ranks along fsdp, whose rows differ, would gather and reduce FSDP's
    parameters in different orders, and wait for each other for ever.
    """

    expected: Sequence[Hidden] = ()
    """What travels for each micro-batch of this run."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns how hidden states are received."""
        if not self.is_first:
            self._make_room(self.args_recv_info[fwd_chunk_id], fwd_chunk_id, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns how gradients of hidden states are received."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id, requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_room(self, places: Sequence[Any], number: int, *, requires_grad: bool) -> None:
        shape, dtype = self.expected[number]
        for place in places:
            place.buffer = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=requires_grad)

    def _validate_fwd_outputs(self, *unused: Any) -> None:
        """Compares no shapes, as torch 2.11 would; `_Part` does."""

    def _validate_stage_tensors(self, *unused: Any) -> None:
        """Compares no shapes, as torch from 2.13 on would under TORCH_DISTRIBUTED_DEBUG=DETAIL; `_Part` does."""


class _StageModule(nn.Module):
    """What torch's schedule calls as this rank's module, once for each micro-batch.

    It hides the model: torch would otherwise reduce FSDP's gradients itself, and only after the last micro-batch.
    """

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        super().__init__()
        self._hidden_model = (model,)
        self._stage = stage
        self._micro_batches: list[Batch] = []
        self._scale: Scale | None = None
        self._expected: Sequence[Hidden] = ()
        self._outputs: Any = None

    def begin(self, micro_batches: Sequence[Batch], scale: Scale | None, expected: Sequence[Hidden]) -> None:
        """Takes the micro-batches that come next; without `scale` their outputs are kept instead."""
        self._micro_batches, self._scale, self._expected = list(micro_batches), scale, expected

    def end(self) -> None:
        """Lets go of the micro-batches."""
        self._micro_batches, self._scale = [], None

    def take_outputs(self) -> Any:
        """Returns the outputs that the last stage has kept, once."""
        outputs, self._outputs = self._outputs, None
        return outputs

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """Returns the hidden states for the next stage or, on the last one, [1] to propagate."""
        index = int(number)  # in main memory: nobody waits
        hidden = received[0] if received else None
        [model] = self._hidden_model
        result = model(hidden, self._micro_batches[index])
        if self._stage.is_last:
            return self._to_propagate(result, cast(Tensor, hidden), index)
        if Hidden(tuple(result.shape), result.dtype) != self._expected[index]:
            raise TrainwrightError(
                f"The last block of stage {self._stage.number} returned {result.dtype} {list(result.shape)}, but "
                f"{self._expected[index]} went into the first. A pipeline needs blocks that keep both."
            )
        return cast(Tensor, result.contiguous())

    def _to_propagate(self, outputs: Any, hidden: Tensor, index: int) -> Tensor:
        if self._scale is None:
            self._outputs = outputs
            return torch.zeros(1, device=hidden.device)
        value = self._scale(outputs, index)
        if (
            not value.requires_grad
        ):  # a micro-batch that weighs nothing; earlier stages wait for a gradient all the same
            value = hidden.sum() * 0.0
        # Its value is of no account: only the gradient goes on from here, which is 1 in any dtype.
        return value.reshape(1).float()


def _given(output: Tensor, target: Tensor) -> Tensor:
    """Returns the last stage's output as the loss, which it is."""
    return output


def _reject_other_keys(model: nn.Module, micro_batch: Batch) -> None:
    """Rejects a batch that the model's own forward would not take, before parts of it are left unread."""
    try:
        inspect.signature(type(model).forward).bind(model, **micro_batch)
    except TypeError as error:
        raise DataError(
            f"{type(model).forward.__qualname__} does not take a batch with the keys {', '.join(micro_batch)}: "
            f"{error}. "
            "Let the collator give it what it takes."
        ) from error
