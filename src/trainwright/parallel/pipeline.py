"""Pipeline parallelism: the layers of each stage, and the schedule that runs micro-batches through the stages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.parallel.mesh import Mesh, gradient_dtype, named_tensors, own_gradient

logger = logging.getLogger(__name__)

STAGE_METHODS = ("begin", "hidden_shape", "beside", "finish")
"""The methods that implement `forward`, together with the blocks."""


class Stage(NamedTuple):
    """One rank's stage of a model: its blocks, and the names of parameters that the first and the last stage share."""

    number: int
    num_stages: int
    blocks: range
    tied: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """True for the stage that receives the batch."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that computes the loss."""
        return self.number == self.num_stages - 1


def reject_pipeline(model: nn.Module, num_stages: int, *, own_parts: Sequence[str] = (), where: Any = None) -> None:
    """Rejects a model that cannot be split into this many stages, or a run with custom code that would not be called.

    `own_parts` are the user's methods of the step (`MyTrainer.train_step`), which the schedule of the stages replaces.
    """

    def reject(problem: str) -> NoReturn:
        raise ConfigError(f"runtime.mesh.pipeline is {num_stages}, but {problem}", where=where)

    kind = type(model)
    path = getattr(model, "blocks", None)
    if own_parts:
        reject(
            f"{', '.join(own_parts)} would not be called: the schedule of the stages runs forward and backward. Remove "
            "pipeline (fsdp and tensor shard a model too), or these methods."
        )
    if not isinstance(path, str):
        reject(
            f"{kind.__name__} is not a sequence of blocks: it has no `blocks`. Use llama, gpt2, bert or vit, or shard "
            "it along fsdp or tensor instead."
        )
    owner = _owner(kind, "forward")
    others = [name for name in ("blocks", *STAGE_METHODS) if _owner(kind, name) is not owner]
    if others:
        reject(
            f"{owner.__name__}.forward and {_owner(kind, others[0]).__name__}.{others[0]} are of different classes, so "
            "the stages would not compute the same as forward. Let one class define forward, blocks, "
            f"{', '.join(STAGE_METHODS)}, or remove pipeline."
        )
    num_blocks = len(_blocks_of(model))
    if num_blocks < num_stages:
        reject(
            f"{kind.__name__} has {num_blocks} blocks ({path}), and each stage needs one. Use at most {num_blocks} "
            "stages, or more layers."
        )
    names = path.split(".")
    for name in (".".join(names[:end]) for end in range(1, len(names) + 1)):
        outer = model.get_submodule(name)
        if outer._forward_hooks or outer._forward_pre_hooks:
            reject(f"{name} has hooks on its forward, which no stage calls. Register them on the blocks instead.")


def split_layers(model: nn.Module, mesh: Mesh) -> None:
    """Keeps the modules of this rank's stage, in place; the others become nn.Identity or None.

    From then on `model(hidden, batch)` runs this stage: the first ignores `hidden`, the last returns the outputs.
    A weight that the first and the last stage share (tied embeddings) stays on both, under the same name.
    """
    num_stages, number = mesh.size("pipeline"), mesh.rank("pipeline")
    reject_pipeline(model, num_stages)
    stages = stages_of(model, num_stages)
    tied = tuple(name for name, numbers in stages.items() if len(numbers) > 1)
    blocks = _split_blocks(len(_blocks_of(model)), num_stages)[number]
    _remove_others(model, "", lambda name: number in stages[name])
    stage: Any = Stage(number, num_stages, blocks, tied)
    model.stage = stage
    # Bound, so that a copy of the model runs its own modules; called through the model, so that hooks (of FSDP) run.
    model.forward = MethodType(_run_stage, model)


def stages_of(model: nn.Module, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Returns the stages that have each parameter and buffer of a full model, under all of its names."""
    blocks = _split_blocks(len(_blocks_of(model)), num_stages)
    stages = {name: _stage_of(name, model, blocks) for name, _ in named_tensors(model)}
    tied = _tied_names(model, stages)
    last = num_stages - 1
    return {name: tuple(sorted({stage, last})) if name in tied else (stage,) for name, stage in stages.items()}


def mark_shared(model: nn.Module) -> None:
    """Sets `num_stages` on each parameter that the first and the last stage share, for norms over stages.

    Call it when the model is sharded along all axes, because sharding creates new parameters.
    """
    stage: Any = model.stage
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in stage.tied:
        if name in own:
            own[name].num_stages = 2  # type: ignore[attr-defined]  # an attribute, like lr_scale


def _run_stage(model: Any, hidden: Tensor | None, batch: Mapping[str, Any], *, only_begins: bool = False) -> Any:
    """Runs this rank's stage instead of the model's forward."""
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


def _split_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Divides the blocks evenly over the stages; the first stages have one more, because the last has the head."""
    few, rest = divmod(num_blocks, num_stages)
    starts = [number * few + min(number, rest) for number in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _stage_of(name: str, model: Any, blocks: Sequence[range]) -> int:
    """Returns the stage that needs a parameter or buffer."""
    if _is_within(name, model.blocks):
        number = int(name.removeprefix(f"{model.blocks}.").partition(".")[0])
        return next(stage for stage, numbers in enumerate(blocks) if number in numbers)
    is_before = any(_is_within(name, part) for part in model.parts_before_blocks)
    return 0 if is_before else len(blocks) - 1


def _tied_names(model: Any, stages: Mapping[str, int]) -> set[str]:
    """Returns all names of weights that the first and the last stage need; rejects those that blocks share."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    tied: set[str] = set()
    for shared in names.values():
        if len({stages[name] for name in shared}) == 1:
            continue
        if any(_is_within(name, model.blocks) for name in shared):
            raise ConfigError(
                f"runtime.mesh.pipeline: {' and '.join(shared)} are one weight, but belong to different stages. Only "
                "modules before and after the blocks may share weights. Use fewer stages, or separate weights."
            )
        tied.update(shared)
    return tied


def _remove_others(module: nn.Module, prefix: str, keeps: Callable[[str], bool]) -> None:
    """Replaces modules without kept parameters by nn.Identity, and other parameters by None."""
    for name, child in module._modules.items():
        kept = [keeps(f"{prefix}{name}.{each}") for each, _ in named_tensors(child)] if child is not None else []
        if child is None or all(kept):
            continue
        if any(kept):
            _remove_others(child, f"{prefix}{name}.", keeps)
        else:
            module._modules[name] = nn.Identity()
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and not keeps(f"{prefix}{name}"):
                tensors[name] = None  # like register_parameter(name, None)


def _owner(kind: type[Any], name: str) -> type[Any]:
    """Returns the class that defines an attribute of a class; the shipped classes in a hierarchy count as one."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), object)
    shipped = [each for each in kind.__mro__ if each.__module__.startswith("trainwright.models.")]
    return shipped[0] if owner in shipped else owner


def _is_within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


HIDDEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes of hidden states that can be sent."""

Batch = Mapping[str, Any]
LossOf = Callable[[Any, int], Tensor]


class Hidden(NamedTuple):
    """The shape and the dtype of the hidden states that are sent from stage to stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Pipeline:
    """The stages of one model; this rank runs one of them. All ranks of a pipeline call the same methods together.

    `tied` are the parameters that the first and the last stage share, each with the group of the pipeline; none on
    other stages. Their gradients are partial sums (`sum_tied_gradients`), and count once in a norm.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, num_micro_batches: int, device: torch.device) -> None:
        self._model: Any = model
        self._device = device
        self._group = mesh.group("pipeline")
        stage: Any = model.stage
        self._stage: Stage = stage
        self._module = _StageModule(model, self._stage)
        self._dtypes: dict[torch.dtype | None, torch.dtype] = {}
        self._schedules: dict[tuple[int, bool], tuple[PipelineScheduleSingle, _RaggedStage]] = {}
        self._known_keys: set[frozenset[str]] = set()
        self.tied: list[tuple[nn.Parameter, Any]] = []
        if self._stage.is_first or self._stage.is_last:
            own = dict(model.named_parameters(remove_duplicate=False))
            tied = {id(own[name]): own[name] for name in self._stage.tied}
            self.tied = [(parameter, self._group) for parameter in tied.values() if parameter.requires_grad]
        idle = (self._stage.num_stages - 1) / (num_micro_batches + self._stage.num_stages - 1)
        logger.info(
            "pipeline: %d stages and %d micro-batches per update: each rank is idle for %d %% of a step.",
            *(self._stage.num_stages, num_micro_batches, round(100 * idle)),
        )

    def run(self, micro_batches: Sequence[Batch], loss_of: LossOf) -> None:
        """Runs forward and backward of all micro-batches; gradients accumulate in `.grad`.

        On the last stage `loss_of(outputs, number)` is called once per micro-batch, in order, with the model's
        outputs; it returns the scalar to propagate. The outputs are not kept, because all logits of an update would not
        fit into memory. Micro-batches may differ in shape; the order of operations depends only on their number.
        """
        self._step(micro_batches, loss_of, has_backward=True)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Any:
        """Returns the model's outputs for a batch on the last stage, None on the others; without gradients."""
        self._step([batch], None, has_backward=False)
        outputs, self._module.outputs = self._module.outputs, None
        return outputs

    @torch.no_grad()
    def sum_tied_gradients(self) -> None:
        """Sums the gradients of shared weights over both ends; after the last backward, before the norm."""
        ranks = dist.get_process_group_ranks(self._group)
        other_end = ranks[-1] if self._stage.is_first else ranks[0]
        for parameter, group in self.tied:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            gradient = own_gradient(parameter)
            assert gradient is not None
            gradient_there = torch.empty_like(gradient)
            # Both ends add the same two values, so their weights stay bitwise equal.
            sending = dist.P2POp(dist.isend, gradient, other_end, group)
            receiving = dist.P2POp(dist.irecv, gradient_there, other_end, group)
            for work in dist.batch_isend_irecv([sending, receiving]):
                work.wait()
            gradient += gradient_there

    def _hidden_of(self, micro_batch: Batch) -> Hidden:
        keys = frozenset(micro_batch)
        if keys not in self._known_keys:
            _reject_other_keys(self._model, micro_batch)
            self._known_keys.add(keys)
        kind = self._device.type
        # The dtype depends on it; the same on every rank at the same time.
        autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if autocast_dtype not in self._dtypes:
            self._dtypes[autocast_dtype] = self._find_dtype(micro_batch)
        return Hidden(tuple(self._model.hidden_shape(**micro_batch)), self._dtypes[autocast_dtype])

    def _find_dtype(self, micro_batch: Batch) -> torch.dtype:
        """Returns the dtype of hidden states by running `begin` of the first stage once, and broadcasting it.

        All ranks of the run do this at the same time, at the first batch, because it is collective for a sharded model.
        """
        number = torch.zeros(1, dtype=torch.int64, device=self._device)
        if self._stage.is_first:
            hidden = self._begin(micro_batch)
            expected = self._model.hidden_shape(**micro_batch)
            if tuple(hidden.shape) != tuple(expected) or hidden.dtype not in HIDDEN_DTYPES:
                raise TrainwrightError(
                    f"{type(self._model).__name__}.begin returned {hidden.dtype} {list(hidden.shape)}, but its "
                    f"hidden_shape returned {list(expected)}. Return equal shapes, in one of the dtypes "
                    f"{', '.join(map(str, HIDDEN_DTYPES))}."
                )
            number.fill_(HIDDEN_DTYPES.index(hidden.dtype))
        dist.broadcast(number, src=dist.get_global_rank(self._group, 0), group=self._group)
        return HIDDEN_DTYPES[int(number)]

    @torch.no_grad()
    def _begin(self, micro_batch: Batch) -> Tensor:
        """Returns the input of the first block; does not advance random generators."""
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()  # dropout would draw
        try:
            return cast(Tensor, self._model(None, micro_batch, only_begins=True))
        finally:
            for module in training:
                module.training = True

    def _step(self, micro_batches: Sequence[Batch], loss_of: LossOf | None, *, has_backward: bool) -> None:
        """Runs the micro-batches with torch's schedule; without `loss_of` the outputs are kept."""
        schedule, stage = self._schedule(len(micro_batches), has_backward=has_backward)
        stage.expected = [self._hidden_of(micro_batch) for micro_batch in micro_batches]
        self._module.micro_batches, self._module.loss_of = list(micro_batches), loss_of
        self._module.expected = stage.expected
        numbers = torch.arange(len(micro_batches))  # the schedule splits this into one number per micro-batch
        try:
            schedule.step(number=numbers, target=numbers if has_backward else None)
        except RuntimeError as error:
            # torch wraps the error of the model, which may be one of ours or out of memory.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        finally:
            self._module.micro_batches, self._module.loss_of = [], None
            stage.clear_runtime_states()

    def _schedule(self, num_micro_batches: int, *, has_backward: bool) -> tuple[PipelineScheduleSingle, _RaggedStage]:
        """Returns the schedule for this number of micro-batches, with this rank's stage."""
        key = num_micro_batches, has_backward
        if key not in self._schedules:
            hidden = torch.empty(0, device="meta", requires_grad=has_backward)  # for any shape
            stage = _RaggedStage(
                self._module,
                self._stage.number,
                self._stage.num_stages,
                self._device,
                input_args=() if self._stage.is_first else (hidden,),
                output_args=(torch.empty(1, device="meta") if self._stage.is_last else hidden,),
                group=self._group,
            )
            kind = Schedule1F1B if has_backward and num_micro_batches >= self._stage.num_stages else ScheduleGPipe
            # The output of the last stage is the loss.
            loss_fn = (lambda output, target: output) if has_backward else None
            self._schedules[key] = kind(stage, num_micro_batches, loss_fn=loss_fn, scale_grads=False), stage
        return self._schedules[key]


class _RaggedStage(PipelineStage):
    """A stage that allocates the receive buffers per micro-batch, so that shapes may differ.

    If micro-batches were sorted by shape, ranks along fsdp, whose rows differ, would gather and reduce FSDP's
    parameters in different orders and deadlock.
    """

    expected: Sequence[Hidden] = ()
    """The hidden states of each micro-batch of this run."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that receive hidden states."""
        if not self.is_first:
            self._allocate(self.args_recv_info[fwd_chunk_id], fwd_chunk_id, requires_grad=self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the operations that receive gradients of hidden states."""
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id, requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[Any], number: int, *, requires_grad: bool) -> None:
        shape, dtype = self.expected[number]
        for info in infos:
            info.buffer = torch.empty(shape, dtype=dtype, device=self.device, requires_grad=requires_grad)

    def _validate_fwd_outputs(self, *unused: Any) -> None:
        """Overrides the comparison of shapes of torch 2.11; `_StageModule` compares them."""

    def _validate_stage_tensors(self, *unused: Any) -> None:
        """The same from torch 2.13 on, under TORCH_DISTRIBUTED_DEBUG=DETAIL."""


class _StageModule(nn.Module):
    """The module that torch's schedule calls once per micro-batch.

    It hides the model, because torch would otherwise reduce FSDP's gradients itself, after the last micro-batch.
    """

    def __init__(self, model: nn.Module, stage: Stage) -> None:
        super().__init__()
        self._hidden_model = (model,)
        self._stage = stage
        self.micro_batches: list[Batch] = []
        self.loss_of: LossOf | None = None
        self.expected: Sequence[Hidden] = ()
        self.outputs: Any = None

    def forward(self, *received: Tensor, number: Tensor) -> Tensor:
        """Returns the hidden states for the next stage or, on the last one, the loss [1]."""
        index = int(number)  # a CPU tensor: no synchronization
        hidden = received[0] if received else None
        [model] = self._hidden_model
        result = model(hidden, self.micro_batches[index])
        if self._stage.is_last:
            return self._loss(result, cast(Tensor, hidden), index)
        if Hidden(tuple(result.shape), result.dtype) != self.expected[index]:
            raise TrainwrightError(
                f"The last block of stage {self._stage.number} returned {result.dtype} {list(result.shape)}, but "
                f"the first got {self.expected[index]}. The blocks of a pipeline must keep shape and dtype."
            )
        return cast(Tensor, result.contiguous())

    def _loss(self, outputs: Any, hidden: Tensor, index: int) -> Tensor:
        if self.loss_of is None:
            self.outputs = outputs
            return torch.zeros(1, device=hidden.device)
        loss = self.loss_of(outputs, index)
        if not loss.requires_grad:  # a micro-batch of weight 0; earlier stages still wait for a gradient
            loss = hidden.sum() * 0.0
        # Its value is not used, only its gradient, which is 1 in any dtype.
        return loss.reshape(1).float()


def _reject_other_keys(model: nn.Module, micro_batch: Batch) -> None:
    """Rejects a batch that the model's own forward would not accept, because stages would ignore additional keys."""
    try:
        inspect.signature(type(model).forward).bind(model, **micro_batch)
    except TypeError as error:
        raise DataError(
            f"{type(model).__name__}.forward does not accept a batch with the keys {', '.join(micro_batch)}: "
            f"{error}. Let the collator return the arguments of the model."
        ) from error
