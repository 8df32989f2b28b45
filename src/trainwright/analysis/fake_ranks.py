"""Builds a run as one of many fake ranks: the real trainer on fake tensors."""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainwright.backends import pick_backend
from trainwright.backends.private_torch import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    keystr,
    tree_leaves,
    tree_leaves_with_path,
    tree_map_only,
    without_modes,
)
from trainwright.build.components import MIN_REFERENCED_SHARE, Build
from trainwright.build.data import may_make_batches
from trainwright.build.parallelize import plan_of
from trainwright.build.run import assemble
from trainwright.compile.regions import EAGER
from trainwright.config import BatchPlan, RunConfig, resolve_batch, resolve_mesh
from trainwright.data.collators.stack import Stack
from trainwright.data.loader import MadeBatches
from trainwright.data.randomness import preserve_generators
from trainwright.errors import ConfigError, DataError
from trainwright.loop.state import count_samples
from trainwright.loop.trainer import Trainer, TrainIterator
from trainwright.memory import offload
from trainwright.models.pretrained import CONFIG_FILE, LoadReport, find_folder, read_config_file
from trainwright.models.pretrained_facts import PretrainedFacts, without_paths
from trainwright.models.quantize import count_weights
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import AXES, Mesh, lay_out
from trainwright.parallel.sharding import ShardingPlan

logger = logging.getLogger(__name__)

ForwardContext = Callable[[], AbstractContextManager[None]]


@dataclass
class UnsplitModel:
    """The model before it is sharded."""

    num_parameters: int = 0
    """Tied parameters count once."""
    parameter_bytes: int = 0
    saved_bytes: int = 0
    """Of parameters and saved buffers."""
    plan: ShardingPlan | None = None
    """The plan of the sharding rules; None without rules."""


@dataclass
class HostBytes:
    """The bytes of the copies on the host."""

    now: int = 0
    most: int = 0

    def add(self, num_bytes: int) -> None:
        """Counts new copies, or (below 0) freed ones."""
        self.now += num_bytes
        self.most = max(self.most, self.now)


@dataclass
class ImaginaryRun:
    """One rank of a run on fake tensors, ready to step."""

    config: RunConfig
    trainer: Trainer
    mesh: Mesh
    plan: BatchPlan
    """The batch arithmetic of the real run; the trainer has a few micro-batches at most."""
    batch: Any
    num_samples: int
    """The number of samples of `batch`."""
    mode: FakeTensorMode
    whole: UnsplitModel
    on_gpu: bool
    """True if the real run uses an accelerator, for which models use other versions of some operations."""
    forward_contexts: list[ForwardContext]
    """Context managers around every `run_forward` of the trainer."""
    host: HostBytes
    """The bytes that `model.offload` keeps on the host."""

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of a step here: one of each kind."""
        return self.trainer.num_micro_batches

    def facts(self) -> dict[str, Any]:
        """Returns the fields that Estimate and Sharding have in common."""
        sizes = self.mesh.sizes
        return {
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "axes": {axis: sizes[axis] for axis in AXES if sizes[axis] > 1},
            "micro_batch_size": self.plan.micro_batch_size,
            "gradient_accumulation_steps": self.plan.gradient_accumulation_steps,
            "batch_shapes": self.batch_shapes(),
            "num_parameters": self.whole.num_parameters,
        }

    def batch_shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of the tensors of a micro-batch by name."""
        self.trainer.set_batch(self.batch, self.num_samples)
        with self.mode:
            micro_batch = next(iter(self.trainer.micro_batches(self.batch)))
        named = tree_leaves_with_path(micro_batch)
        return {
            keystr(path).strip("[]'.") or "batch": list(each.shape)
            for path, each in named
            if isinstance(each, torch.Tensor)
        }

    def step(self, num_micro_batches: int | None = None) -> None:
        """Runs one update of the trainer's micro-batches, or (1) of only the first of them."""
        trainer, batch = self.trainer, self.batch
        gradient_accumulation_steps, micro = self.num_micro_batches, self.plan.micro_batch_size
        wanted = num_micro_batches or gradient_accumulation_steps
        assert wanted in (1, gradient_accumulation_steps)
        with self.mode, _read_ones(), trainer.storage, _forms(self.host, on_gpu=self.on_gpu):
            trainer.set_batch(batch, self.num_samples)
            if wanted < gradient_accumulation_steps:
                batch = next(iter(trainer.micro_batches(batch)))
                trainer.set_batch(batch, micro)
                trainer.set_num_micro_batches(1)
            trainer.context.updater.begin_step(trainer.step)
            try:
                with trainer.gather_mixed:
                    trainer.train_step(batch)
            finally:
                trainer.set_num_micro_batches(gradient_accumulation_steps)


@contextmanager
def imaginary_ranks(axes: Mapping[str, int], *, world_size: int, rank: int = 0) -> Iterator[Ranks]:
    """Opens a process group of fake ranks, of which this process is one, and closes it."""
    if dist.is_initialized():
        raise ConfigError("Fake ranks need a process without a process group, but this one has one.")
    if not 0 <= rank < world_size:
        raise ConfigError(f"--rank: {rank} is not one of the {world_size} ranks. Use 0 to {world_size - 1}.")
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield Ranks(rank, world_size, mesh=lay_out(axes, device_type="cpu"))
    finally:
        dist.destroy_process_group()


@contextmanager
def imagine(
    config: RunConfig, *, world_size: int, rank: int = 0, sequence_length: int | None = None
) -> Iterator[ImaginaryRun]:
    """Builds a run as one of its ranks, without a device, a run folder and weights.

    A batch has the shapes of the first batch of the training data; with `sequence_length`, no data is read, and a
    sample is a row of this many tokens.
    """
    axes = resolve_mesh(config, world_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    contexts: list[ForwardContext] = []
    with (
        preserve_generators(),
        imaginary_ranks(axes, world_size=world_size, rank=rank) as ranks,
        tempfile.TemporaryDirectory() as folder,
    ):
        user_class = Build(config).trainer_class()
        makes_batches = sequence_length is None and may_make_batches(user_class, config)
        plan = resolve_batch(config, ranks.mesh.num_data_ranks, makes_batches=makes_batches)
        trial = _trial_config(config, plan, ranks.mesh, Path(folder), has_data=sequence_length is None)
        whole = UnsplitModel()
        trainer_class = _imaginary_class(user_class, mode, whole, ranks.mesh, sequence_length, contexts)
        ranks.size = 1  # a build compares the model over all ranks, but the others are fake
        with mode, _read_ones():
            trainer, _ = assemble(
                trial,
                trainer_class,
                pick_backend("cpu"),
                ranks,
                Path(folder) / "run",
                kept=_kept_facts(config),
                evaluates=False,
            )
        ranks.size = world_size
        trainer.model.train()
        batch, num_samples = _first_batch(trainer, mode), plan.micro_batch_size * trainer.num_micro_batches
        if trainer.context.batch_plan.varies:
            num_samples = count_samples(batch, None)
            number = plan.num_micro_batches(num_samples)
            micro = math.ceil(num_samples / number)
            plan = BatchPlan(micro * number * ranks.mesh.num_data_ranks, micro, number)
            trainer.set_num_micro_batches(number)
        yield ImaginaryRun(
            config=config,
            trainer=trainer,
            mesh=ranks.mesh,
            plan=plan,
            batch=batch,
            num_samples=num_samples,
            mode=mode,
            whole=whole,
            on_gpu=not config.runtime.device.startswith("cpu"),
            forward_contexts=contexts,
            host=HostBytes(),
        )


def planned_precision(config: RunConfig) -> str:
    """Returns the precision of the run on the device that it is planned for: a GPU, unless `runtime.device` is cpu."""
    if config.runtime.precision != "auto":
        return config.runtime.precision
    return "fp32" if config.runtime.device.startswith("cpu") else "bf16"


def _trial_config(config: RunConfig, plan: BatchPlan, mesh: Mesh, folder: Path, *, has_data: bool) -> RunConfig:
    """Returns the run's config for steps only, with at most a few micro-batches."""
    # The first has no gradients to add to, the last reduces them, and a pipeline needs one for each stage.
    gradient_accumulation_steps = min(plan.gradient_accumulation_steps, max(2, mesh.size("pipeline")))
    sizes = {
        "trainer.micro_batch_size": plan.micro_batch_size,
        "trainer.global_batch_size": plan.micro_batch_size * gradient_accumulation_steps * mesh.num_data_ranks,
        "data.sampler": None,  # the order does not matter
        "data.last_batch": None,
        "trainer.gradient_accumulation_steps": None,
    }
    changes: dict[str, Any] = {
        "output_dir": str(folder),
        "runtime.device": "cpu",
        **EAGER,
        **({} if plan.varies else sizes),
        "data.num_workers": 0,
        "data.loader": {},
        "data.eval": {},
        "data.test": None,
        "evaluation": {},
        "checkpoint": {},
        "writers": [],
    }
    if config.runtime.precision == "auto":
        changes["runtime.precision"] = planned_precision(config)
    if not has_data:
        changes["data"] = {}
    if config.model is not None and "compile_repeated_blocks" in config.model:
        # It changes what is compiled, not the memory.
        changes["model"] = {key: value for key, value in config.model.items() if key != "compile_repeated_blocks"}
    return config.derive({key: value for key, value in changes.items() if has_data or not key.startswith("data.")})


def _imaginary_class(
    kind: type[Trainer],
    mode: FakeTensorMode,
    whole: UnsplitModel,
    mesh: Mesh,
    sequence_length: int | None,
    contexts: list[ForwardContext],
) -> type[Trainer]:
    """Returns a subclass of the trainer that builds fake models and real data, and runs forwards in `contexts`."""

    def build_model(cls: type[Trainer], build: Any) -> torch.nn.Module:
        inherited = super(imagined, cls).build_model  # type: ignore[misc]
        try:
            model: torch.nn.Module = inherited(build)
        except Exception as error:
            # A constructor that reads values of tensors; any other error is raised again.
            with without_modes():
                model = _without_memory(inherited(build), mode)
            logger.info("The model was built in main memory, because it cannot be built on fake tensors: %s", error)
        parameters = list(model.parameters())
        saved = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)}
        whole.num_parameters = count_weights(model)
        whole.parameter_bytes = sum(each.nbytes for each in parameters)
        whole.saved_bytes = sum(each.nbytes for each in saved.values()) - _referenced_bytes(model, build.config)
        whole.plan = plan_of(model, build.config, mesh.sizes)
        # torch cannot move fake parameters that have references.
        model.to = lambda *_, **__: model  # type: ignore[method-assign]
        return model

    def build_frozen_models(cls: type[Trainer], build: Any, model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
        inherited = super(imagined, cls).build_frozen_models  # type: ignore[misc]
        build.kept_of = lambda section: _kept_facts(build.config.derive({"model": section}))
        try:
            models: Mapping[str, torch.nn.Module] = inherited(build, model)
        except Exception:  # as in build_model
            with without_modes():
                models = {name: _without_memory(each, mode) for name, each in inherited(build, model).items()}
        for each in models.values():
            each.to = lambda *_, each=each, **__: each  # type: ignore[method-assign]
        return models

    def run_forward(self: Trainer, batch: Any) -> Any:
        with ExitStack() as stack:
            for each in contexts:
                stack.enter_context(each())
            return super(imagined, self).run_forward(batch)  # type: ignore[misc]

    def outside(part: str) -> Any:
        def build_part(cls: type[Trainer], build: Any) -> Any:
            try:
                with without_modes():
                    return getattr(super(imagined, cls), f"build_{part}")(build)
            except (ConfigError, DataError) as error:
                if part != "train_data":
                    raise
                advice = "Or use --length N: a sample is then a row of N tokens, and no data is read."
                raise ConfigError(f"{error.problem} {advice}", where=error.where) from error

        return classmethod(build_part)

    body: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {f"build_{part}": outside(part) for part in ("task", "train_data", "eval_data", "collator", "hooks")}
    body |= {
        "run_forward": run_forward,
        "build_model": classmethod(build_model),
        "build_frozen_models": classmethod(build_frozen_models),
        "build_writers": classmethod(lambda cls, build: build.writers()),  # of the trial's config: none
    }
    if sequence_length is not None:
        rows = _Rows(sequence_length)
        body["build_train_data"] = classmethod(lambda cls, build: rows)
        body["build_collator"] = classmethod(lambda cls, build: Stack())
    imagined = cast(type[Trainer], type(kind.__name__, (kind,), body))
    return imagined


def _referenced_bytes(model: torch.nn.Module, config: RunConfig) -> int:
    """Returns the size of the frozen pretrained weights, which a checkpoint stores by reference."""
    if config.model is None or "pretrained" not in config.model.reserved:
        return 0
    parameters = list(model.parameters())
    frozen = sum(each.nbytes for each in parameters if not each.requires_grad)
    return frozen if frozen >= MIN_REFERENCED_SHARE * sum(each.nbytes for each in parameters) else 0


def _first_batch(trainer: Trainer, mode: FakeTensorMode) -> Any:
    """Reads the first batch of this rank, or lets the trainer make it, and returns it as fake tensors."""
    data = trainer.train_data
    assert data is not None
    with TrainIterator(data, trainer.batches_to_device) as feed:
        if not isinstance(data, MadeBatches):
            batch = trainer.next_train_inputs(feed)
        else:
            try:
                with mode, _read_ones(), trainer.storage:
                    batch = trainer.next_train_inputs(feed)
            except Exception as error:
                raise ConfigError(
                    "data.train: there is no dataset, and next_train_inputs cannot make a batch on fake tensors, which "
                    f"have no values: {type(error).__name__}: {error} Use --length N for rows of N tokens."
                ) from error
            if any(isinstance(each, torch.Tensor) and each.grad_fn for each in tree_leaves(batch)):
                raise ConfigError(
                    "data.train: there is no dataset, and next_train_inputs computes the batch with gradients, which "
                    "serve one step only. Compute them in forward, or use --length N for rows of N tokens."
                )
    return tree_map_only(torch.Tensor, mode.from_tensor, batch)


def _without_memory(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Replaces every parameter and buffer of a model with a fake tensor; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = made.setdefault(id(tensor), mode.from_tensor(tensor))  # type: ignore[assignment]
    return model


def _kept_facts(config: RunConfig) -> PretrainedFacts | None:
    """Returns the config of a pretrained folder, without its weights."""
    given: Any = None if config.model is None else config.model.reserved.get("pretrained")
    if given is None:
        return None
    settings = {"folder": given} if isinstance(given, (str, Path)) else dict(given)
    if not settings.get("folder"):
        return None  # build_model_section raises
    in_project = Path(config.project_dir) / Path(settings["folder"]).expanduser()
    folder = find_folder(in_project if in_project.is_dir() else settings["folder"], home_path=settings.get("home_path"))
    content = without_paths(read_config_file(folder)) if (folder / CONFIG_FILE).is_file() else None
    return PretrainedFacts(content, LoadReport((), ()))


class _Rows:
    """A dataset of rows of tokens, of any number."""

    def __init__(self, length: int) -> None:
        self.tokens_per_sample = length

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(self.tokens_per_sample, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}


_FILLED = "_filled_with"
_COUNTS = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)
_SHORT = 64  # an arange up to this length is not an activation, and may be real
_MAX_EQUAL_READS = 100  # consecutive reads of one line, which indicate a loop that waits for another value


class _ReadOnes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 1 if the host reads a value of a fake tensor, or the number that the tensor was filled with.

    A loop that reads until the value changes eventually reads 0, such as that of torch's `trunc_normal_`, which draws
    again while some values are out of range.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._last_read: tuple[int, int] | None = None
        self._num_equal_reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its operations on local tensors follow
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
            return kind(0 if self._is_repeated(sys._getframe(1)) else getattr(args[0], _FILLED, 1))
        if func is torch.ops.aten.fill_.Scalar and isinstance(args[0], FakeTensor):
            setattr(args[0], _FILLED, args[1])
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        if not (args and isinstance(args[0], FakeTensor)):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            is_short_count = func in _COUNTS and all(isinstance(each, int) and each <= _SHORT for each in args)
            if is_short_count or (tensors and not any(isinstance(each, FakeTensor) for each in tensors)):
                # Real tensors stay real: the ranks of torch's meshes, the sizes of a pipeline's micro-batches.
                with without_modes():
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_repeated(self, frame: FrameType) -> bool:
        """Returns True if one line of one call has read many values, and then counts from the start."""
        line = id(frame), frame.f_lineno  # not the frame itself, which would keep its tensors
        self._num_equal_reads = self._num_equal_reads + 1 if line == self._last_read else 0
        self._last_read = line if self._num_equal_reads < _MAX_EQUAL_READS else None
        return self._last_read is None


def _read_ones() -> AbstractContextManager[Any]:
    return cast(AbstractContextManager[Any], _ReadOnes())


class _ImaginaryCopy:
    """A copy on the host that replaces offload.HostCopy; it uses device memory only for tensors that are copied
    back."""

    def __init__(self, tensor: torch.Tensor, stream: Any, previous: _ImaginaryCopy | None, *, host: HostBytes) -> None:
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._previous = previous
        self._returning: torch.Tensor | None = None
        self._returned: weakref.ref[torch.Tensor] | None = None
        host.add(self._num_bytes)
        weakref.finalize(self, host.add, -self._num_bytes)

    def finish(self) -> None:
        """Does nothing, because the copied tensor is not referenced."""

    def data(self) -> torch.Tensor:
        """Returns bytes on the device, and starts the return of the copy before."""
        returned = None if self._returned is None else self._returned()
        if returned is None:
            self.begin_return()
            returned, self._returning = self._returning, None
            assert returned is not None
            self._returned = weakref.ref(returned)
            if self._previous is not None:
                self._previous.begin_return()
        return returned

    def begin_return(self) -> None:
        """Allocates memory of the device."""
        if self._returning is None:
            self._returning = torch.empty(self._num_bytes, dtype=torch.uint8)


@contextmanager
def _forms(host: HostBytes, *, on_gpu: bool) -> Iterator[None]:
    """Selects the operations of the real run, because models select them by device, which is the CPU here."""
    if not on_gpu:
        yield
        return
    modules = [vars(each) for key, each in list(sys.modules.items()) if key.startswith("trainwright.models.")]
    replaced: list[tuple[dict[str, Any], str, Callable[..., Any]]] = [
        (names, "waits_for_memory", lambda device: True) for names in modules if "waits_for_memory" in names
    ]
    replaced += [*_fused_forms(), (vars(offload), "HostCopy", partial(_ImaginaryCopy, host=host))]
    originals = [(names, name, names[name]) for names, name, _ in replaced]
    try:
        for names, name, other in replaced:
            names[name] = other
        yield
    finally:
        for names, name, original in originals:
            names[name] = original


def _fused_forms() -> list[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """Returns the fused attention and RMS norm of a GPU, with the namespace and name that they replace.

    The CPU versions would store the scores of all pairs of tokens, and several float32 copies of the inputs of norms. A
    torch function mode would not be active during a backward, which recomputes some forwards.
    """
    functional = vars(torch.nn.functional)
    attend, normalise = functional["scaled_dot_product_attention"], functional["rms_norm"]

    def attend_without_dropout(*args: Any, **kwargs: Any) -> Any:
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        return attend(*args, **{name: value for name, value in kwargs.items() if name != "dropout_p"})

    def normalise_fused(hidden: torch.Tensor, shape: Any, weight: torch.Tensor | None = None, eps: Any = None) -> Any:
        if isinstance(hidden, DTensor) or isinstance(weight, DTensor):
            return normalise(hidden, shape, weight, eps)
        apply: Callable[..., torch.Tensor] = _FusedNorm.apply
        return apply(hidden, weight)

    return [
        (functional, "scaled_dot_product_attention", attend_without_dropout),
        (functional, "rms_norm", normalise_fused),
    ]


class _FusedNorm(torch.autograd.Function):
    """Saves the same tensors as a fused norm, its input and one number per row, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        rows = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)
