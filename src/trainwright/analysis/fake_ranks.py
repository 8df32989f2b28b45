"""Builds a run on one of many fake ranks: the real trainer on tensors that have shapes and no memory."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
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
from trainwright.build.components import Build
from trainwright.build.parallelize import plan_of
from trainwright.build.run import assemble
from trainwright.config import BatchPlan, RunConfig, resolve_batch, resolve_mesh
from trainwright.data.collators.stack import Stack
from trainwright.data.randomness import preserve_generators
from trainwright.errors import ConfigError, DataError
from trainwright.loop.trainer import Feed, Trainer
from trainwright.memory import offload
from trainwright.models.pretrained import CONFIG_FILE, LoadReport, find_folder, read_config_file
from trainwright.models.pretrained_facts import PretrainedFacts, without_paths
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import Mesh, lay_out
from trainwright.parallel.sharding import ShardingPlan

logger = logging.getLogger(__name__)


@dataclass
class UnsplitModel:
    """What the model was before it was split."""

    num_parameters: int = 0
    """Tied ones once."""
    parameter_bytes: int = 0
    saved_bytes: int = 0
    """Of parameters and saved buffers."""
    plan: ShardingPlan | None = None
    """What sharding rules say of it; None where there are none."""


@dataclass
class ImaginaryRun:
    """One rank of a run, ready to step: nothing in it has memory."""

    config: RunConfig
    trainer: Trainer
    mesh: Mesh
    plan: BatchPlan
    """The batch arithmetic of the real run; the trainer's own takes a few micro-batches at most."""
    batch: Any
    mode: FakeTensorMode
    whole: UnsplitModel
    on_gpu: bool
    """Would the run be on an accelerator? Models then take other forms of some operations."""

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches a step takes here: all that differ, the others of the real run are alike."""
        return self.trainer.context.batch.gradient_accumulation_steps

    def batch_shapes(self) -> dict[str, list[int]]:
        """Returns the shapes of a micro-batch's tensors, by name where it has names."""
        self.trainer.samples_in_hand = self.plan.micro_batch_size * self.num_micro_batches
        with self.mode:
            micro_batch = next(iter(self.trainer.micro_batches(self.batch)))
        named = tree_leaves_with_path(micro_batch)
        return {
            keystr(path).strip("[]'.") or "batch": list(each.shape)
            for path, each in named
            if isinstance(each, torch.Tensor)
        }

    def step(self, num_micro_batches: int | None = None) -> None:
        """Makes one update of the trainer's micro-batches, or (1) of the first of them alone."""
        trainer, batch = self.trainer, self.batch
        gradient_accumulation_steps, micro = self.num_micro_batches, self.plan.micro_batch_size
        wanted = num_micro_batches or gradient_accumulation_steps
        assert wanted in (1, gradient_accumulation_steps)
        context = trainer.context
        with self.mode, _read_ones(), trainer.storage, _forms(on_gpu=self.on_gpu), _nothing_waits_on_the_host():
            trainer.samples_in_hand = micro * gradient_accumulation_steps
            if wanted < gradient_accumulation_steps:
                batch = next(iter(trainer.micro_batches(batch)))
                trainer.context = replace(context, batch=BatchPlan(micro, micro, wanted))
            trainer.samples_in_hand = micro * wanted
            context.updater.set_rates(trainer.step)
            try:
                trainer.train_step(batch)
            finally:
                trainer.context = context


@contextmanager
def imaginary_ranks(axes: Mapping[str, int], *, world_size: int, rank: int = 0) -> Iterator[Ranks]:
    """Opens a process group of ranks that are not there, and closes it; this process stands for one of them."""
    if dist.is_initialized():
        raise ConfigError("A plan of ranks needs a process of its own: this one has a process group already.")
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
    """Builds a run as one of its ranks would, and yields it; no device, no run folder and no weights are touched.

    The shapes of a batch are those of the training data's first; with `sequence_length` no data is read, and a sample
    is a row of so many tokens.
    """
    with (
        preserve_generators(),
        _imagined(config, world_size=world_size, rank=rank, sequence_length=sequence_length) as run,
    ):
        yield run


@contextmanager
def _imagined(config: RunConfig, *, world_size: int, rank: int, sequence_length: int | None) -> Iterator[ImaginaryRun]:
    axes = resolve_mesh(config, world_size)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with imaginary_ranks(axes, world_size=world_size, rank=rank) as ranks, tempfile.TemporaryDirectory() as folder:
        plan = resolve_batch(config, ranks.mesh.num_data_ranks)
        trial = _trial_config(config, plan, ranks.mesh, Path(folder), has_data=sequence_length is None)
        whole = UnsplitModel()
        kind = Build(trial).trainer_class()
        trainer_class = _imagining(kind, mode, whole, ranks.mesh, sequence_length)
        # While a model is built ranks ask each other whether they have the same one; nobody would answer.
        ranks.size = 1
        backend = pick_backend("cpu")
        with mode, _read_ones():
            trainer, _ = assemble(
                trial, trainer_class, backend, ranks, Path(folder) / "run", kept=_kept_facts(config), evaluates=False
            )
        ranks.size = world_size
        trainer.model.train()
        yield ImaginaryRun(
            config=config,
            trainer=trainer,
            mesh=ranks.mesh,
            plan=plan,
            batch=_first_batch(trainer, mode),
            mode=mode,
            whole=whole,
            on_gpu=not config.runtime.device.startswith("cpu"),
        )


def _trial_config(config: RunConfig, plan: BatchPlan, mesh: Mesh, folder: Path, *, has_data: bool) -> RunConfig:
    """The run's config, without what acts outside of the step, and with a few micro-batches at most."""
    # The first has no gradients to add to, the last reduces them, and a pipeline has as many under way as stages.
    gradient_accumulation_steps = min(plan.gradient_accumulation_steps, max(2, mesh.size("pipeline")))
    changes: dict[str, Any] = {
        "output_dir": str(folder),
        "runtime.device": "cpu",
        "runtime.mode": "eager",
        "trainer.micro_batch_size": plan.micro_batch_size,
        "trainer.global_batch_size": plan.micro_batch_size * gradient_accumulation_steps * mesh.num_data_ranks,
        "trainer.gradient_accumulation_steps": None,
        "data.num_workers": 0,
        "data.loader": {},
        "data.eval": {},
        "data.test": None,
        "evaluation": {},
        "checkpoint": {},
        "writers": [],
    }
    if not has_data:
        changes["data"] = {}
    if config.model is not None and "compile_repeated_blocks" in config.model:
        # It changes what is compiled, not what is held.
        changes["model"] = {key: value for key, value in config.model.items() if key != "compile_repeated_blocks"}
    return config.derive({key: value for key, value in changes.items() if has_data or not key.startswith("data.")})


def _imagining(
    kind: type[Trainer], mode: FakeTensorMode, whole: UnsplitModel, mesh: Mesh, sequence_length: int | None
) -> type[Trainer]:
    """Returns the trainer's class with `build_*` methods that make models without memory, and data for real."""

    def build_model(cls: type[Trainer], build: Any) -> torch.nn.Module:
        inherited = super(imagined, cls).build_model  # type: ignore[misc]
        try:
            model: torch.nn.Module = inherited(build)
        except Exception as error:
            # A constructor that reads values of tensors; if it is wrong otherwise too, it now says so.
            with without_modes():
                model = _without_memory(inherited(build), mode)
            logger.info("The model was built in main memory, for it cannot be built without: %s", error)
        parameters = list(model.parameters())
        saved = {id(each): each for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)}
        whole.num_parameters = sum(each.numel() for each in parameters)
        whole.parameter_bytes = sum(each.nbytes for each in parameters)
        whole.saved_bytes = sum(each.nbytes for each in saved.values())
        whole.plan = plan_of(model, build.config, mesh.sizes)
        # It is where it will be, and torch cannot move parameters without memory that somebody refers to.
        model.to = lambda *_, **__: model  # type: ignore[method-assign]
        return model

    def outside(part: str) -> Any:
        def build_part(cls: type[Trainer], build: Any) -> Any:
            try:
                with without_modes():
                    return getattr(super(imagined, cls), f"build_{part}")(build)
            except (ConfigError, DataError) as error:
                if part != "train_data":
                    raise
                advice = "Or give --length N: rows of N tokens are then taken as samples, and no data is read."
                raise ConfigError(f"{error.problem} {advice}", where=error.where) from error

        return classmethod(build_part)

    body: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    body |= {f"build_{part}": outside(part) for part in ("task", "train_data", "eval_data", "collator", "hooks")}
    body |= {
        "build_model": classmethod(build_model),
        "build_writers": classmethod(lambda cls, build: build.writers()),  # of the trial's config: none
    }
    if sequence_length is not None:
        rows = _Rows(sequence_length)
        body["build_train_data"] = classmethod(lambda cls, build: rows)
        body["build_collator"] = classmethod(lambda cls, build: Stack())
    imagined = cast(type[Trainer], type(kind.__name__, (kind,), body))
    return imagined


def _first_batch(trainer: Trainer, mode: FakeTensorMode) -> Any:
    """Reads the first batch of this rank for real, and returns its shapes."""
    assert trainer.train_data is not None
    with Feed(trainer.train_data, trainer.backend) as feed:
        batch = trainer.next_train_inputs(feed)
    return tree_map_only(torch.Tensor, mode.from_tensor, batch)


def _without_memory(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Replaces every parameter and buffer of a model by one without memory; tied ones stay tied."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = made.setdefault(id(tensor), mode.from_tensor(tensor))  # type: ignore[assignment]
    return model


def _kept_facts(config: RunConfig) -> PretrainedFacts | None:
    """What a pretrained folder says of the model's sizes: its weights are not needed."""
    given: Any = None if config.model is None else config.model.reserved.get("pretrained")
    if given is None:
        return None
    settings = {"folder": given} if isinstance(given, (str, Path)) else dict(given)
    if not settings.get("folder"):
        return None  # build_model_section says what is wrong with it
    beside = Path(config.project_dir) / Path(settings["folder"]).expanduser()
    folder = find_folder(beside if beside.is_dir() else settings["folder"], home_path=settings.get("home_path"))
    content = without_paths(read_config_file(folder)) if (folder / CONFIG_FILE).is_file() else None
    return PretrainedFacts(content, LoadReport((), ()))


class _Rows:
    """As many rows of tokens as anybody asks for."""

    def __init__(self, length: int) -> None:
        self.tokens_per_sample = length

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(self.tokens_per_sample, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}


_FILLED = "_filled_with"
_COUNTS = (torch.ops.aten.arange.default, torch.ops.aten.arange.start, torch.ops.aten.arange.start_step)
_SHORT = 64  # a count so short is no activation: it may be real


class _ReadOnes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it a value that the host reads from a tensor without memory is 1: finite, true, and there.

    A tensor that was filled with a number is read as that: ranks tell each other numbers so.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations follow, on local tensors
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            kind = bool if args[0].dtype == torch.bool else float if args[0].is_floating_point() else int
            return kind(getattr(args[0], _FILLED, 1))
        if func is torch.ops.aten.fill_.Scalar and isinstance(args[0], FakeTensor):
            setattr(args[0], _FILLED, args[1])
        if func is torch.ops.aten.equal.default and isinstance(args[0], FakeTensor):
            return True
        if not (args and isinstance(args[0], FakeTensor)):
            tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            is_short_count = func in _COUNTS and all(isinstance(each, int) and each <= _SHORT for each in args)
            if is_short_count or (tensors and not any(isinstance(each, FakeTensor) for each in tensors)):
                # What is real stays so: the numbers of ranks in torch's meshes, those of a pipeline's pieces.
                with without_modes():
                    return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _read_ones() -> AbstractContextManager[Any]:
    return cast(AbstractContextManager[Any], _ReadOnes())  # type: ignore[no-untyped-call]


@contextmanager
def _nothing_waits_on_the_host() -> Iterator[None]:
    """Keeps offloading from warning that it moves nothing: what has no memory is never moved, and a remark says so."""
    level = offload.logger.level
    offload.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        offload.logger.setLevel(level)


@contextmanager
def _forms(*, on_gpu: bool) -> Iterator[None]:
    """Lets our models take the forms of their operations that they would take in the run.

    They choose by the device of a tensor; one without memory is on the CPU.
    """
    answers: dict[str, Callable[..., bool]] = {"waits_for_memory": lambda device: True} if on_gpu else {}
    modules = [vars(each) for key, each in list(sys.modules.items()) if key.startswith("trainwright.models.")]
    replaced = [(names, verb, answers[verb]) for names in modules for verb in answers if verb in names]
    replaced += _fused_forms() if on_gpu else []
    own = [(names, verb, names[verb]) for names, verb, _ in replaced]
    try:
        for names, verb, other in replaced:
            names[verb] = other
        yield
    finally:
        for names, verb, before in own:
            names[verb] = before


def _fused_forms() -> list[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """Attention with dropout and root-mean-square norms, fused as on a GPU: where they stand, by name.

    The CPU's forms would hold the scores of all pairs of tokens, and several float32 copies of what is normalised. No
    torch function mode: it is off while a backward runs, and what is recomputed then must be what it was.
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
    """Holds what a fused norm holds: its input and one number a row. Nothing is computed: there are no values."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        rows = hidden.new_empty((*hidden.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(hidden, weight, rows)
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), None if weight is None else torch.empty_like(weight)
