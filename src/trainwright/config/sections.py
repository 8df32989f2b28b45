"""The sections of a run's config: keys, types, defaults and their documentation.

`RunConfig`, which has all of them, and the rules across sections are in schema.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from trainwright.config.component import Component
from trainwright.config.frozen import Frozen, freeze, thaw
from trainwright.config.problems import Problem, describe, reject, reject_all, suggest


class Section(BaseModel):
    """A section of the config: read-only, without unknown keys and without implicit conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting of the section as plain dicts and lists."""
        return {name: thaw(value) for name, value in self}


def _whole(value: Any) -> Any:
    # 1e3 is a float in YAML.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _tuple_or_one(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def empty_section(value: Any) -> Any:
    """Return an empty section for null, the value of a YAML section whose keys are all commented out."""
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
    """Name a bare component `eval`, and validate the names of the sets."""
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


def _epochs_instead_of_steps(value: Any) -> Any:
    """Replace the default of `every_steps` by None if `every_epochs` is set; with both, both apply."""
    if isinstance(value, Mapping) and value.get("every_epochs") is not None and "every_steps" not in value:
        return {**value, "every_steps": None}
    return value


class LoaderArguments(Section):
    """Arguments for the DataLoader."""

    prefetch_factor: Count | None = None
    """Batches that each worker prefetches."""
    pin_memory: bool | None = None
    """Whether batches are in pinned (page-locked) memory."""
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds to wait for a worker; 0: no limit."""
    multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None = None
    """How workers are started: fork, spawn or forkserver."""


_LOADER_KEYS_ELSEWHERE: Mapping[str, str] = {
    "batch_size": "Set trainer.global_batch_size and trainer.micro_batch_size.",
    "shuffle": "Set data.shuffle.",
    "sampler": "Set data.sampler.",
    "batch_sampler": "Set data.sampler, which may be a batch sampler.",
    "drop_last": "Set data.last_batch: drop.",
    "collate_fn": "Set data.collator.",
    "num_workers": "Set data.num_workers.",
    "worker_init_fn": "Each sample's randomness is seeded from the run's seed and the sample's position.",
    "generator": "Set seed.",
}


def _loader_arguments(value: Any) -> Any:
    """Validate the DataLoader's arguments; an argument with a separate setting is rejected with its name."""
    if not isinstance(value, Mapping):
        return value
    known = list(LoaderArguments.model_fields)
    wrong = []
    for key in value:
        if key in _LOADER_KEYS_ELSEWHERE:
            wrong.append(Problem((key,), f"is not set here. {_LOADER_KEYS_ELSEWHERE[key]}"))
        elif key not in known:
            wrong.append(Problem((key,), f"the loader has no such argument. {suggest(str(key), known)}"))
    if wrong:
        raise reject_all(wrong, value)
    checked = LoaderArguments.model_validate(thaw(value))
    return {key: getattr(checked, key) for key in value}


class SplitSizes(Section):
    """Numbers of training samples that are moved to other sets."""

    valid: Count | None = None
    """The number of samples of the set `valid`; None: no such set."""
    test: Count | None = None
    """The number of samples of the test set; None: no such set."""

    @model_validator(mode="after")
    def _cuts_something(self) -> SplitSizes:
        if self.valid is None and self.test is None:
            raise reject((), "splits off nothing. Set valid, test or both: {valid: 100, test: 100}.", {})
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
    """Part of the cache key, with the function's source and arguments; change it if code that it calls changes."""
    num_workers: Annotated[Whole, Field(ge=0)] = 0
    """The number of processes that call the function; 0: the run's process calls it."""


class ProcessSection(Component):
    """A function that is applied to rows, with its arguments and the settings of ProcessOptions."""

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


def _field_names(value: Any) -> Any:
    """Validate the names of a tuple's elements."""
    names = _tuple(value)
    if not isinstance(names, tuple) or not names or not all(isinstance(each, str) and each for each in names):
        raise reject((), f"must be a list of names, such as [pixel_values, labels]; got {describe(value)}.", value)
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise reject((), f"{twice[0]} is there twice. Give each element its own name.", value)
    return names


class DataSection(Section):
    """Datasets, and how samples become batches."""

    train: Component | None = None
    """The training set; None if a task or a trainer builds it, or if next_train_inputs makes the batches."""
    eval: Annotated[Frozen[Component], BeforeValidator(_named_sets)] = Field(default_factory=Frozen)
    """The named evaluation sets. One bare component is named `eval`. Empty: no evaluation."""
    test: Component | None = None
    """Evaluated once, at the end; it does not select a checkpoint."""
    split: Annotated[Ratios | Sizes, Discriminator(_kind_of_split)] | None = None
    """Splits train into train, valid and test by ratios, or by the sizes of valid and test. None: no split."""
    process: ProcessSection | None = None
    """A function that is applied to each row once; the result is cached on disk and shared between runs."""
    collator: Component = Field(default_factory=lambda: Component("stack"))
    """Converts a list of samples to a batch."""
    fields: Annotated[tuple[str, ...], BeforeValidator(_field_names)] | None = None
    """The names of the elements of tuple samples, such as [pixel_values, labels]; None: samples have names,
    or are pairs for a classification trainer."""
    num_workers: Annotated[Whole, Field(ge=0)] = 0
    """The number of processes that load data; 0: the run's process loads."""
    loader: Annotated[Frozen[Any], BeforeValidator(_loader_arguments)] = Field(default_factory=Frozen)
    """Further arguments of the DataLoader, such as prefetch_factor."""
    sampler: Component | None = None
    """The order of the training samples: weighted, or any torch Sampler or BatchSampler; None: `shuffle` defines it."""
    last_batch: Literal["straddle", "short", "drop"] | None = None
    """The samples at the end of an epoch that do not fill a batch. straddle: the batch continues with the next epoch.
    short: the batch is smaller. drop: they are dropped. None: straddle, or short for a stream."""
    shuffle: bool | None = None
    """Whether each epoch has a different order, derived from the seed. None: true, unless there is a sampler."""
    group_by_length: bool = False
    """Whether a batch has samples of similar length, which reduces padding."""
    shuffle_buffer: Count = 1000
    """Rows in the shuffle buffer of a stream; at most this many are read again when a run resumes."""
    on_error: Literal["raise", "skip"] = "raise"
    """Whether a row that cannot be read ends the run, or is skipped and listed in skipped_rows.json."""
    max_skipped: Count = 100
    """The maximum number of skipped rows; one more ends the run."""

    @property
    def shuffles(self) -> bool:
        """True if `shuffle` is true or not set."""
        return self.shuffle is not False

    @property
    def cut_off(self) -> tuple[str, ...]:
        """The names of the sets that `split` splits off from train."""
        if isinstance(self.split, SplitSizes):
            return tuple(name for name, size in self.split if size is not None)
        return ("valid", "test")[: len(self.split) - 1] if self.split else ()


class OptimizerSection(Section):
    """One of several optimizers, with its schedule and its parameters."""

    optimizer: Component
    """The optimizer's type and arguments."""
    schedule: Component | None = None
    """The learning-rate schedule; None: the optimizer's own rates, which hooks may change."""
    match: Annotated[tuple[str, ...], BeforeValidator(_tuple_or_one), Field(min_length=1)] = ("*",)
    """Globs of the names of the parameters that this optimizer updates."""


BUILT_IN_TRAINERS = (
    "trainer",
    "language_model",
    "masked_language_model",
    "classification",
    "sequence_to_sequence",
    "sft",
    "dpo",
    "reward",
    "distill",
    "grpo",
)


class TrainerSection(Section):
    """How the model is updated. Further keys are options of the trainer."""

    # schema.py checks unknown keys: whether they are allowed depends on `type`.
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, BeforeValidator(freeze)]] = Field(init=False)

    type: Annotated[str, Field(min_length=1)] = "trainer"
    """A built-in trainer's name, or your class: `trainers/mine.py:MyTrainer`."""
    max_steps: Count | None = None
    """The number of optimizer updates; None: derived from max_epochs, max_samples or max_tokens."""
    max_epochs: Positive | None = None
    """The number of passes over the training set; may be fractional."""
    max_samples: Count | None = None
    """The number of samples over all ranks."""
    max_tokens: Count | None = None
    """The number of tokens over all ranks."""
    global_batch_size: Count | None = None
    """Samples per update over all ranks; None: derived from micro_batch_size and gradient_accumulation_steps, or 32.
    Without a dataset None allows any number."""
    micro_batch_size: MicroBatch = None
    """Samples per forward on one rank; auto: the largest that fits into memory; None: derived. Without a dataset it is
    the maximum."""
    gradient_accumulation_steps: Count | None = None
    """Forwards per update on one rank; None: derived, or 1."""
    loss: Component | None = None
    """The loss of a model that returns no loss: a function of the outputs and the labels, such as
    torch.nn:CrossEntropyLoss; None: the model's loss or its `criterion`."""
    max_grad_norm: Positive | None = None
    """The maximum norm of the gradients; larger gradients are scaled down. None: no limit."""
    max_grad_value: Positive | None = None
    """The maximum absolute value of each gradient element; larger values are clamped. None: no limit."""
    optimizer_in_backward: bool = False
    """Whether parameters are stepped during the backward pass, once their gradients are complete, and the gradients are
    freed. Requires one micro-batch per update, one process, and no clipping."""
    optimizer: Component | None = None
    """The optimizer of all parameters; None if `optimizers`, a task or a trainer defines it."""
    schedule: Component | None = None
    """The learning-rate schedule; None: the optimizer's own rates, which hooks may change."""
    optimizers: Frozen[OptimizerSection] = Field(default_factory=Frozen)
    """Several optimizers by name, instead of `optimizer`."""

    if not TYPE_CHECKING:  # otherwise mypy would accept any attribute

        def __getattr__(self, name: str) -> Any:
            # An option that a compiled forward reads: pydantic's own method would break the graph.
            if not name.startswith("_"):
                options = self.__pydantic_extra__
                if options and name in options:
                    return options[name]
            return super().__getattr__(name)

    @property
    def options(self) -> Frozen[Any]:
        """The further keys, unchanged."""
        return Frozen(self.__pydantic_extra__)

    @model_validator(mode="after")
    def _reject_both_optimizers(self) -> TrainerSection:
        names = ", ".join(self.optimizers)
        problems = []
        if names and self.optimizer is not None:
            text = f"is set together with trainer.optimizers ({names}). Keep one of the two."
            problems.append(Problem(("optimizer",), text))
        if names and self.schedule is not None:
            text = f"has no effect: each of trainer.optimizers ({names}) has its own schedule. Move it there."
            problems.append(Problem(("schedule",), text))
        if problems:
            raise reject_all(problems)
        return self


BENCHMARK_SETTINGS = ("name", "batch_size", "log_samples")
"""The keys of an entry of evaluation.benchmarks that every benchmark has; the others are constructor arguments."""

BENCHMARK_NAME = re.compile(r"[A-Za-z][\w.-]*")


def benchmark_name(component: Component) -> str:
    """Return the name of a benchmark: its `name`, or the name of its file, or of its class."""
    given, path = component.arguments.get("name"), component.arguments.get("path")
    if given is not None:
        return str(given)
    if isinstance(path, str):
        return path.rpartition("/")[2].partition(".")[0]
    return re.split(r"[:.]", component.type)[-1]


class EvaluationSection(Section):
    """When the evaluation sets and the benchmarks are evaluated, and with which metrics."""

    every_steps: Count | None = None
    """Steps between evaluations; None disables evaluation by steps. The last step is always evaluated."""
    every_epochs: Positive | None = None
    """Epochs between evaluations, such as 1 or 0.25; None disables evaluation by epochs."""
    metrics: Frozen[Component] = Field(default_factory=Frozen)
    """Metrics by name, in addition to those that the trainer's eval_step returns."""
    batch_size: Count | None = None
    """Samples per forward over all ranks; None: as in training."""
    max_batches: Count | None = None
    """Batches per set and per benchmark; None: all batches."""
    benchmarks: Components = ()
    """Benchmarks of language models. In addition to its constructor arguments, each has name (default: that of its
    file), batch_size (samples per forward, 8) and log_samples (samples in the results file, 100)."""


class KeepBest(Section):
    """Which checkpoint is the best."""

    metric: str
    """The set and its metric: `valid/loss`."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""


class CheckpointSection(Section):
    """When checkpoints are written and which are kept."""

    folder: Annotated[str, Field(min_length=1)] | None = None
    """A folder or a URL such as s3://bucket/runs, in which checkpoints are stored under the run's name; None:
    `checkpoints` in the run folder."""
    every_steps: Count | None = 500
    """Steps between checkpoints; None disables saving by steps, and is the default if every_epochs is set. The last
    step is always saved."""
    every_epochs: Positive | None = None
    """Epochs between checkpoints, such as 1 or 0.25; None disables saving by epochs."""
    every_minutes: Positive | None = None
    """Minutes between checkpoints; None disables saving by time."""
    every_samples: Count | None = None
    """Samples between checkpoints; None disables saving by samples."""
    contents: Literal["full", "weights"] = "full"
    """full: everything that a resumed run needs. weights: only the trained and averaged weights, for evaluation and
    export; a run cannot resume from such a checkpoint."""
    keep_last: Count | None = 3
    """Number of newest checkpoints to keep; None: all."""
    keep_best: KeepBest | None = None
    """Also keep the best checkpoint; None: only the newest."""
    keep_every: Count | None = None
    """Also keep the checkpoints of every Nth step; None: only the newest."""
    asynchronous: bool = True
    """Whether files are written in the background, from a host copy of the state."""
    max_failures: Count = 3
    """Consecutive failed saves (a full disk, a lost mount) after which the run ends."""

    _replace_default = model_validator(mode="before")(_epochs_instead_of_steps)


class LogSection(Section):
    """How often a line is written."""

    every_steps: Count | None = 10
    """Steps per line of metrics.json; None disables lines by steps, and is the default if every_epochs is set. The last
    step is always written."""
    every_epochs: Positive | None = None
    """Epochs per line of metrics.json, such as 1 or 0.25; None disables lines by epochs."""

    _replace_default = model_validator(mode="before")(_epochs_instead_of_steps)

    @model_validator(mode="after")
    def _has_period(self) -> LogSection:
        if self.every_steps is None and self.every_epochs is None:
            raise reject(("every_steps",), "null needs log.every_epochs: a line is written by steps or by epochs.", {})
        return self


def _axis(value: Any) -> Any:
    number = _whole(value)
    if number is None or (isinstance(number, int) and not isinstance(number, bool) and (number > 0 or number == -1)):
        return number
    raise reject((), f"must be a positive whole number, or -1 for the remaining ranks; got {describe(value)}.", value)


Axis: TypeAlias = Annotated[int | None, BeforeValidator(_axis)]


class MeshSection(Section):
    """The number of ranks along each mesh axis. -1: the remaining ranks; None: 1."""

    replicate: Axis = None
    """Ranks with a full replica of the model; all ranks if no axis is set."""
    fsdp: Axis = None
    """Ranks over which parameters, gradients and optimizer state are sharded, each with its own data."""
    tensor: Axis = None
    """Ranks over which the matrices of each layer are sharded."""
    context: Axis = None
    """Ranks over which each sequence is sharded."""
    pipeline: Axis = None
    """Ranks over which the layers are distributed."""

    @model_validator(mode="after")
    def _reject_second_remainder(self) -> MeshSection:
        rest = [axis for axis, size in self if size == -1]
        if len(rest) > 1:
            text = f"only one axis can be -1, got {' and '.join(rest)}. Set the others to a number."
            raise reject((rest[1],), text)
        return self


class Fp8Section(Section):
    """Which linear layers train in fp8, and how."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """tensorwise: one scale for each tensor, and all three products in fp8. rowwise: one scale for each row, which is
    more accurate; gradients of weights are computed in bf16."""
    match: Annotated[tuple[str, ...], BeforeValidator(_tuple_or_one), Field(min_length=1)] | None = None
    """Globs of the paths of the layers; None: the layers of all blocks except the first and the last that are large
    enough to gain."""
    skip: Annotated[tuple[str, ...], BeforeValidator(_tuple_or_one)] = ()
    """Globs of the paths of layers that stay in bf16."""


class RuntimeSection(Section):
    """Device, precision, execution mode and mesh."""

    device: Annotated[str, Field(min_length=1)] = "auto"
    """auto, cpu, cuda or tpu; auto: the fastest one that is available."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """The autocast dtype of the forward; parameters are fp32 unless model.dtype is set. auto: bf16 on GPUs from compute
    capability 8.0 and on TPUs, fp32 on CPUs and older GPUs; the run folder records the choice, which a resumed run
    keeps. fp8: bf16, and the matrix products of large linear layers in fp8 while training."""
    tf32: bool = True
    """Whether fp32 matrix products and convolutions use TF32 on a GPU: several times faster, with 10 instead of 23 bits
    of the factors. Set for the run and restored afterwards; other devices ignore it."""
    fp8: Fp8Section | None = None
    """Which layers train in fp8, and how; requires precision fp8. None: the defaults."""
    mode: Literal["eager", "compile", "graph"] = "eager"
    """How a step is executed; the result is the same in each mode."""
    compile_backend: Annotated[str, Field(min_length=1)] | None = None
    """In mode compile, and in mode graph on a GPU, the backend of torch.compile; None: inductor. On a CPU mode graph
    compiles nothing."""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """The `mode` of torch.compile, wherever inductor compiles: in mode compile, in mode graph on a GPU, and for
    model.compile_repeated_blocks on a GPU. reduce-overhead and max-autotune raise, because they capture CUDA graphs,
    which mode graph does."""
    compile_options: Annotated[Frozen[Any], BeforeValidator(empty_section)] = Field(default_factory=Frozen)
    """The `options` of torch.compile, such as {max_autotune_gemm: true}, instead of compile_mode;
    `torch._inductor.list_options()` lists them."""
    compile_memory_budget: Annotated[float, Field(ge=0, le=1)] | None = None
    """In mode compile, and in mode graph on a GPU, the fraction of the activations that is kept for the backward pass;
    the cheapest others are recomputed. None: the compiler decides."""
    max_graph_breaks: Annotated[int, Field(ge=0)] | None = None
    """In mode compile, and in mode graph on a GPU, the maximum number of graph breaks: one more ends the run; None: no
    limit."""
    deterministic: bool = False
    """Whether torch uses only deterministic kernels, which is slower on a GPU; an operation without one raises."""
    mesh: Annotated[MeshSection, BeforeValidator(empty_section)] = Field(default_factory=MeshSection)
    """The sizes of the mesh axes."""
    reshard_after_forward: bool = True
    """With fsdp, whether a block's parameters are resharded after its forward and gathered again for its backward."""
    accumulate_unsharded: bool = False
    """With fsdp, whether unsharded gradients accumulate over micro-batches and are reduced once; needs more memory."""
    gather_precision: Literal["fp32", "bf16"] | None = None
    """With fsdp, the dtype in which parameters are gathered and used; None: bf16 with precision bf16 or fp8, otherwise
    their own dtype."""

    @model_validator(mode="after")
    def _reject_fp8_without_effect(self) -> RuntimeSection:
        if self.fp8 is not None and self.precision != "fp8":
            text = f"has no effect with runtime.precision {self.precision}. Set precision: fp8, or remove it."
            raise reject(("fp8",), text, {})
        return self


class AnomaliesSection(Section):
    """The response to losses and gradients that are not finite, and to loss spikes."""

    non_finite: Literal["raise", "skip", "rollback"] = "raise"
    """For a loss or gradient norm that is nan or infinite: end the run, skip the update, or undo it."""
    spike: Literal["ignore", "raise", "skip", "rollback"] = "ignore"
    """For a loss far above those of recent steps: ignore it, end the run, skip the update, or undo it."""
    spike_window: Annotated[Count, Field(ge=8)] = 100
    """The number of recent good steps that a loss is compared with; at least a quarter of them, and at least five, are
    needed."""
    spike_threshold: Positive = 10.0
    """The number of robust standard deviations above the window's median beyond which a loss is a spike."""
    max_anomalies: Count = 10
    """The number of skipped or undone updates after which the run ends."""
    skip_batches: Count = 1
    """The number of batches that are skipped after a rollback, starting with the one that caused it."""
    snapshot_every_steps: Count | None = None
    """Steps between host snapshots for rollbacks; None: roll back to the newest checkpoint."""


class PreemptionSection(Section):
    """How the run exits when a rank receives SIGTERM, SIGUSR1, SIGHUP or Ctrl-C."""

    deadline_seconds: Positive = 25.0
    """Seconds after SIGTERM, SIGUSR1 or SIGHUP until the process exits without saving if the step has not ended.
    Clusters commonly kill a process after 30 seconds."""
    requeue: bool = False
    """Whether an interrupted SLURM job requeues itself with `scontrol requeue`."""


class WatchdogSection(Section):
    """When a rank counts as stuck; the run then writes a report and exits."""

    watch: bool = True
    """Whether the watchdog is active."""
    factor: Positive = 20.0
    """A phase is stuck after this multiple of its median duration."""
    min_seconds: Positive = 600.0
    """Minimum seconds before a phase counts as stuck."""
