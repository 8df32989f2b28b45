"""The sections of a run's config: their keys, types and defaults, each with a sentence on what it means.

A section only declares. Rules between sections are in checks.py; `RunConfig`, which holds them all, is in schema.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from trainwright.config.component import Component
from trainwright.config.frozen import Frozen, freeze, thaw
from trainwright.config.problems import Problem, describe, reject, reject_all, suggest


class Section(BaseModel):
    """A part of the config: read-only, every key known, nothing converted behind the user's back."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting of the section as plain dicts and lists."""
        return {name: thaw(value) for name, value in self}


def _whole(value: Any) -> Any:
    # 1e3 is a float to YAML and a whole number to its writer.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tuple_or_one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def empty_section(value: Any) -> Any:
    """Read a section whose keys are all commented out (null to YAML) as an empty one."""
    return {} if value is None else value


Whole: TypeAlias = Annotated[int, BeforeValidator(_whole)]
Count: TypeAlias = Annotated[int, BeforeValidator(_whole), Field(gt=0)]


def _micro_batch(value: Any) -> Any:
    number = _whole(value)
    if number in (None, "auto") or (isinstance(number, int) and not isinstance(number, bool) and number > 0):
        return number
    raise reject((), f"must be a positive whole number, or auto; got {describe(value)}.", value)


MicroBatch: TypeAlias = Annotated[int | Literal["auto"] | None, BeforeValidator(_micro_batch)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Texts: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_tuple)]
Components: TypeAlias = Annotated[tuple[Component, ...], BeforeValidator(_tuple)]

_SET_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def _named_sets(value: Any) -> Any:
    """Name a bare component `eval`, and check the names of the sets."""
    if isinstance(value, str) or (isinstance(value, Mapping) and isinstance(value.get("type"), str)):
        return {"eval": value}
    if not isinstance(value, Mapping):
        return value
    wrong = [
        Problem((name,), f'"{name}" cannot name an evaluation set. Use small letters, digits, - and _, not "train".')
        for name in value
        if name == "train" or not _SET_NAME.fullmatch(name)
    ]
    if wrong:
        raise reject_all(wrong, value)
    return value


class LoaderArguments(Section):
    """What a user may pass on to the DataLoader."""

    prefetch_factor: Count | None = None
    """Batches that each worker loads ahead."""
    pin_memory: bool | None = None
    """Whether batches lie in memory that the device can copy from by itself."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait for a worker; 0: for ever."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started: fork, spawn or forkserver."""


_LOADER_KEYS_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "Set trainer.global_batch_size and trainer.micro_batch_size.",
    "shuffle": "Set data.shuffle.",
    "sampler": "The order is a pure function of the seed, so that a run resumes exactly; data.shuffle turns it off.",
    "batch_sampler": "The order is a pure function of the seed, so that a run resumes exactly.",
    "drop_last": "A batch may straddle epochs, so no sample is dropped.",
    "collate_fn": "Set data.collator.",
    "num_workers": "Set data.num_workers.",
    "worker_init_fn": "Each sample's randomness is seeded from the run's seed and the sample's position.",
    "generator": "Set seed.",
}


def _loader_arguments(value: Any) -> Any:
    """Check the DataLoader's arguments; what has its own setting elsewhere is rejected with that setting."""
    if not isinstance(value, Mapping):
        return value
    known = list(LoaderArguments.model_fields)
    wrong = []
    for key in value:
        if key in _LOADER_KEYS_ELSEWHERE:
            wrong.append(Problem((key,), f"is not set here. {_LOADER_KEYS_ELSEWHERE[key]}"))
        elif key not in known:
            wrong.append(Problem((key,), f"the loader takes no such argument. {suggest(str(key), known)}"))
    if wrong:
        raise reject_all(wrong, value)
    checked = LoaderArguments.model_validate(thaw(value))
    return {key: getattr(checked, key) for key in value}


class SplitSizes(Section):
    """How many samples are cut from train for evaluation; the rest is for training."""

    valid: Count | None = None
    """Samples of the set `valid`; None: there is none."""
    test: Count | None = None
    """Samples of the test set; None: there is none."""

    @model_validator(mode="after")
    def _cuts_something(self) -> SplitSizes:
        if self.valid is None and self.test is None:
            raise reject((), "cuts nothing off. Give valid, test or both: {valid: 100, test: 100}.", {})
        return self


def _kind_of_split(value: Any) -> str:
    return "[sizes]" if isinstance(value, (Mapping, SplitSizes)) else "[ratios]"


Ratios: TypeAlias = Annotated[
    tuple[Positive, ...], BeforeValidator(_tuple), Field(min_length=2, max_length=3), Tag("[ratios]")
]
Sizes: TypeAlias = Annotated[SplitSizes, Tag("[sizes]")]


def _version(value: Any) -> Any:
    if value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)):
        return value
    raise reject((), f"must be text or a number; got {describe(value)}.", value)


class ProcessOptions(Section):
    """The settings of `data.process` that are not arguments of its function."""

    version: Annotated[str | int | float | None, BeforeValidator(_version)] = None
    """Part of the cache's key beside the function's source and arguments; change it when code that it calls changes."""
    num_workers: Annotated[Whole, Field(ge=0)] = 0
    """Processes that call the function; 0 calls it in the run's own process."""


class ProcessSection(Component):
    """A function that rows go through, with its arguments and the settings of ProcessOptions beside them."""

    __slots__ = ()

    reserved_keys: ClassVar[tuple[str, ...]] = tuple(ProcessOptions.model_fields)

    @property
    def options(self) -> ProcessOptions:
        """The settings that are not the function's arguments."""
        return ProcessOptions.model_validate(dict(self.reserved))

    @classmethod
    def _read(cls, value: Any) -> Component:
        section = super()._read(value)
        ProcessOptions.model_validate(dict(section.reserved))
        return section


class DataSection(Section):
    """Where samples come from and how they become batches."""

    train: Component | None = None
    """The training set; None where a task or a trainer builds it."""
    eval: Annotated[Frozen[Component], BeforeValidator(_named_sets)] = Field(default_factory=Frozen)
    """The named evaluation sets. One bare component is named `eval`. Empty: no evaluation."""
    test: Component | None = None
    """Evaluated once, at the end; it never chooses a checkpoint."""
    split: Annotated[Ratios | Sizes, Discriminator(_kind_of_split)] | None = None
    """Cuts train into train, valid and test: by ratios, or with the sizes of valid and test. None: it is used whole."""
    process: ProcessSection | None = None
    """A function that each row goes through once; the result is kept on disk and shared by all runs that need it."""
    collator: Component = Field(default_factory=lambda: Component("stack"))
    """Makes one batch of a list of samples."""
    num_workers: Annotated[Whole, Field(ge=0)] = 0
    """Processes that load data; 0 loads in the run's own process."""
    loader: Annotated[Frozen[Any], BeforeValidator(_loader_arguments)] = Field(default_factory=Frozen)
    """Further arguments of the DataLoader, such as prefetch_factor."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from the seed."""
    group_by_length: bool = False
    """Whether a batch holds samples of about equal length, which needs less padding."""
    shuffle_buffer: Count = 1000
    """Rows of a stream that are shuffled with each other; at most as many are read again when a run goes on."""
    on_error: Literal["raise", "skip"] = "raise"
    """What a row that cannot be read does: ends the run, or is left out and listed in skipped_rows.json."""
    max_skipped: Count = 100
    """Rows that may be left out before the run ends after all."""

    @property
    def cut_off(self) -> tuple[str, ...]:
        """The names of the sets that `split` cuts off from train."""
        if isinstance(self.split, SplitSizes):
            return tuple(name for name, size in self.split if size is not None)
        return ("valid", "test")[: len(self.split) - 1] if self.split else ()


class OptimizerSection(Section):
    """One of several optimizers: its parameters, its update, its schedule."""

    optimizer: Component
    """The optimizer's type and arguments."""
    schedule: Component | None = None
    """Its learning rate over the steps; None keeps the optimizer's own."""
    match: Annotated[tuple[str, ...], BeforeValidator(_tuple_or_one), Field(min_length=1)] = ("*",)
    """Globs over parameter names: what this optimizer updates."""


class TrainerSection(Section):
    """How the model is updated. With a user's trainer, further keys are kept and read as attributes."""

    # Unknown keys are judged in checks.py: whether they are allowed depends on `type`.
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(freeze)]] = Field(init=False)

    type: Annotated[str, Field(min_length=1)] = "trainer"
    """A built-in trainer's name, or where yours is: `trainers/mine.py:MyTrainer`."""
    max_steps: Count | None = None
    """Optimizer updates; None: from max_epochs, max_samples or max_tokens."""
    max_epochs: Positive | None = None
    """Passes over the training set; a part of one is allowed."""
    max_samples: Count | None = None
    """Samples seen by all ranks together."""
    max_tokens: Count | None = None
    """Tokens seen by all ranks together."""
    global_batch_size: Count | None = None
    """Samples per update over all ranks; None: derived from the two below, or 32."""
    micro_batch_size: MicroBatch = None
    """Samples per forward on one rank; auto: as many as the memory allows; None: derived."""
    gradient_accumulation_steps: Count | None = None
    """Forwards per update on one rank; None: derived, or 1."""
    max_grad_norm: Positive | None = None
    """Gradients are scaled down to this norm; None: never."""
    max_grad_value: Positive | None = None
    """Each gradient is cut to ± this value; None: never."""
    optimizer: Component | None = None
    """The optimizer of all parameters; None where `optimizers`, a task or a trainer gives it."""
    schedule: Component | None = None
    """Its learning rate over the steps; None keeps the optimizer's own."""
    optimizers: Frozen[OptimizerSection] = Field(default_factory=Frozen)
    """Several optimizers by name, instead of `optimizer`."""

    @property
    def options(self) -> Frozen[Any]:
        """The further keys, which only a user's trainer has."""
        return Frozen(self.__pydantic_extra__)


class EvaluationSection(Section):
    """When the evaluation sets are measured, and by what."""

    every_steps: Count | None = None
    """Steps between evaluations; None: once, at the end."""
    metrics: Frozen[Component] = Field(default_factory=Frozen)
    """Metrics by name, beside what the trainer's eval_step returns."""
    batch_size: Count | None = None
    """Samples per forward over all ranks; None: as in training."""
    max_batches: Count | None = None
    """Batches per set; None: the whole set."""


class KeepBest(Section):
    """Which checkpoint is kept for being the best."""

    metric: str
    """The set and its metric: `valid/loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """Where they go, below it in a folder of the run's name: a folder, or an address such as s3://bucket/runs; None:
    `checkpoints` in the run folder."""
    every_steps: Count | None = 500
    """Steps between checkpoints; None: not by steps. There is always one at the end."""
    every_minutes: Positive | None = None
    """Minutes between checkpoints; None: not by time."""
    every_samples: Count | None = None
    """Samples between checkpoints; None: not by samples."""
    keep_last: Count | None = 3
    """How many of the newest are kept; None: all."""
    keep_best: KeepBest | None = None
    """Also keep the best one; None: only the newest."""
    keep_every: Count | None = None
    """Also keep those of every so many steps; None: only the newest."""
    asynchronous: bool = True
    """Whether files are written beside training, from a copy in main memory as large as the state."""
    max_failures: Count = 3
    """Saves in a row that may fail (a full disk, a lost mount) before the run ends."""


class LogSection(Section):
    """How often a line is written."""

    every_steps: Count = 10
    """Steps per line of metrics.json; the last step is always written."""


def _axis(value: Any) -> Any:
    number = _whole(value)
    if number is None or (isinstance(number, int) and not isinstance(number, bool) and (number > 0 or number == -1)):
        return number
    raise reject((), f"must be a positive whole number, or -1 for what is left; got {describe(value)}.", value)


Axis: TypeAlias = Annotated[int | None, BeforeValidator(_axis)]


class MeshSection(Section):
    """How many ranks along each axis of the mesh. -1 takes what is left; None: not given, so 1."""

    replicate: Axis = None
    """Copies of the whole model; takes every rank when no axis is given."""
    fsdp: Axis = None
    """Ranks that share the model's parameters between them, each with its own data."""
    tensor: Axis = None
    """Ranks that share each layer's matrices."""
    context: Axis = None
    """Ranks that share each sequence."""
    pipeline: Axis = None
    """Ranks that share the layers."""


class RuntimeSection(Section):
    """On what and how the steps run."""

    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto, cpu, cuda or tpu; auto takes the best there is."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """The type of the forward's arithmetic; parameters stay as they are: fp32 unless model.dtype says otherwise."""
    mode: Literal["eager", "compile", "graph"] = "eager"
    """How a step runs; its meaning is the same in each."""
    compile_backend: Annotated[str, Field(min_length=1)] | None = None
    """In mode compile, and in mode graph on a GPU, the backend of torch.compile; None: inductor. On a CPU mode graph
    compiles nothing."""
    compile_memory_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """In mode compile, and in mode graph on a GPU, the share of the activations that is kept for the backward pass; the
    compiler computes the cheapest of the rest again. None: as many as it likes."""
    max_graph_breaks: Annotated[int, Field(ge=0)] | None = None
    """In mode compile, and in mode graph on a GPU, how many places may break the graph: one more ends the run; None:
    any number."""
    deterministic: bool = False
    """Whether torch may use only kernels that give the same bits every time, slower on a GPU; it rejects an operation
    that has none."""
    mesh: Annotated[MeshSection, BeforeValidator(empty_section)] = Field(default_factory=MeshSection)
    """How the ranks are laid out."""
    reshard_after_forward: bool = True
    """Along fsdp, whether a block's parameters are dropped after its forward and gathered again for its backward."""
    accumulate_unsharded: bool = False
    """Along fsdp, whether gradients of several micro-batches are added up whole and reduced once; more memory."""
    gather_precision: Literal["fp32", "bf16"] | None = None
    """Along fsdp, the type in which parameters are gathered and computed with; None: as they are."""


class AnomaliesSection(Section):
    """What an update does whose loss or gradient is not finite, or far from those before it."""

    non_finite: Literal["raise", "skip", "rollback"] = "raise"
    """A loss or gradient norm that is nan or infinite: ends the run, is not applied, or is undone."""
    spike: Literal["ignore", "raise", "skip", "rollback"] = "ignore"
    """A loss far above those of the steps before: ignored, ends the run, is not applied, or is undone."""
    spike_window: Annotated[Count, Field(ge=8)] = 100
    """Good steps whose losses a spike is measured against; a quarter of them, at least five, must be there."""
    spike_threshold: Positive = 10.0
    """How many robust standard deviations above the window's median a loss is a spike."""
    max_anomalies: Count = 10
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


class WatchdogSection(Section):
    """When a rank that does not move is taken for stuck; a report is written and the run leaves."""

    watch: bool = True
    """Whether anybody looks."""
    factor: Positive = 20.0
    """Stuck is a phase that takes so many times its median."""
    min_seconds: Positive = 600.0
    """No phase is stuck before so many seconds, whatever its median."""
