"""`SweepConfig`: the settings of `trainwright sweep sweep.yaml`, and the points of its grid. Does not import torch.

A sweep refers to the file of a run; each entry of `parameters` is a setting of that run, and is validated here.
launch/sweep.py executes a sweep.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, model_validator

from trainwright.config import yaml_text
from trainwright.config.files import parse_file
from trainwright.config.frozen import Frozen, freeze, same, thaw
from trainwright.config.interpolation import escape_plain
from trainwright.config.overrides import apply_overrides
from trainwright.config.problems import Problem, describe, explain, raise_all, reject, reject_all
from trainwright.config.schema import FolderName, RunConfig, check_metric
from trainwright.config.sections import Count, Section, Texts, Whole
from trainwright.config.yaml_text import KeyPath, Node, Origin, nearest_origin
from trainwright.errors import ConfigError
from trainwright.tracebacks import shown_path

_SET_BY_SWEEP = {
    "name": "each trial has its own",
    "output_dir": "set it in the run's file or in overrides",
    "checkpoint.folder": "set it in the run's file or in overrides",
}
Number: TypeAlias = Annotated[int | float, Field(allow_inf_nan=False)]


class Range(Section):
    """The values from `min` to `max`, both included; integers if both limits are integers."""

    min: Number
    """The smallest value."""
    max: Number
    """The largest value."""
    scale: Literal["linear", "log"] = "linear"
    """log: the logarithm is distributed uniformly, as for learning rates."""
    step: Number | None = None
    """The distance between adjacent values; None: any value. A grid needs it."""

    @property
    def is_whole(self) -> bool:
        """True if the values are whole numbers."""
        return isinstance(self.min, int) and isinstance(self.max, int) and isinstance(self.step, int | None)

    @model_validator(mode="after")
    def _is_not_empty(self) -> Range:
        if self.min >= self.max:
            raise reject((), f"the range is empty: min {self.min:g} is not below max {self.max:g}.")
        if self.scale == "log" and self.min <= 0:
            raise reject(("min",), f"must be more than 0 with scale: log, got {self.min:g}.", self.min)
        if self.step is not None and self.scale == "log":
            raise reject(("step",), "has no effect with scale: log. Remove one of the two, or list the values.")
        if self.step is not None and not 0 < self.step <= self.max - self.min:
            raise reject(("step",), f"must be more than 0 and at most max - min, got {self.step:g}.", self.step)
        return self

    def values(self) -> tuple[int | float, ...] | None:
        """Return all values; None if the range is continuous."""
        if self.step is None and not self.is_whole:
            return None
        step = self.step or 1
        number = math.floor((self.max - self.min) / step + 1e-9) + 1
        return tuple(self.min + index * step for index in range(number))


def _parameters(value: Any) -> Any:
    """Validate each parameter: a list of values, or a range."""
    if not isinstance(value, Mapping):
        return value
    if not value:
        raise reject((), "is empty. Name at least one setting, such as trainer.optimizer.lr: [1e-4, 1e-3].", value)
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for name, given in value.items():
        path: KeyPath = (name,)
        if isinstance(given, Mapping):
            if given and not set(given) & set(Range.model_fields):
                inner = next(iter(given))
                text = (
                    f"must be a list of values, or a range such as {{min: 1, max: 8}}. Write {name}.{inner} as one key."
                )
                problems.append(Problem(path, text))
                continue
            try:
                found[name] = Range.model_validate(thaw(given))
            except ValidationError as error:
                problems += [Problem((name, *each.path), each.text) for each in explain(error, Range)]
        elif isinstance(given, list | tuple):
            found[name] = tuple(freeze(each) for each in given)
            problems += _check_choices(path, found[name])
        else:
            text = f"must be a list of values, or a range such as {{min: 1, max: 8}}; got {describe(given)}."
            problems.append(Problem(path, text))
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            problems.append(Problem((name,), f"is a part of {outer}, which is a parameter too. Keep one of the two."))
        if name in _SET_BY_SWEEP:
            problems.append(Problem((name,), f"cannot be a parameter: {_SET_BY_SWEEP[name]}."))
    if problems:
        raise reject_all(problems, value)
    return found


def _check_choices(path: KeyPath, choices: tuple[Any, ...]) -> Iterator[Problem]:
    if not choices:
        yield Problem(path, "has no values. List at least one.")
    twice = next((one for index, one in enumerate(choices) if any(same(one, each) for each in choices[:index])), None)
    if twice is not None:
        yield Problem(path, f"has the value {yaml_text.write_inline(thaw(twice))} twice. Remove one.")


class SamplerSection(Section):
    """How the values of the next trial are chosen."""

    type: Literal["grid", "random", "tpe"] = "tpe"
    """grid: every combination, in order. random: independent values. tpe: values like those of the best trials."""
    seed: Annotated[Whole, Field(ge=0)] = 0
    """The seed, which determines the values together with the number of the trial and, for tpe, the results so far."""
    startup_trials: Count | None = None
    """Random trials before tpe begins; None: 10."""

    @model_validator(mode="after")
    def _reject_unused(self) -> SamplerSection:
        if self.type == "grid" and "seed" in self.model_fields_set:
            raise reject(("seed",), "has no effect with type: grid. Remove it.")
        if self.type != "tpe" and self.startup_trials is not None:
            raise reject(("startup_trials",), f"has no effect with type: {self.type}, only with tpe. Remove it.")
        return self


class PrunerSection(Section):
    """Which trials end early, decided after each of their evaluations."""

    type: Literal["median", "percentile", "successive_halving"] = "median"
    """median: worse than half of the earlier trials at the same step. percentile: not among the best `percentile` %.
    successive_halving: not among the best 1/`reduction_factor` at the steps where trials are compared."""
    startup_trials: Annotated[Whole, Field(ge=0)] = 5
    """Finished trials before a trial can be pruned; for median and percentile."""
    warmup_steps: Annotated[Whole, Field(ge=0)] = 0
    """Steps of a trial before it can be pruned; for median and percentile."""
    percentile: Annotated[float, Field(gt=0, lt=100)] = 25.0
    """For type: percentile."""
    reduction_factor: Annotated[Whole, Field(ge=2)] = 4
    """For type: successive_halving."""

    @model_validator(mode="after")
    def _reject_unused(self) -> PrunerSection:
        used = {
            "median": ("startup_trials", "warmup_steps"),
            "percentile": ("startup_trials", "warmup_steps", "percentile"),
            "successive_halving": ("reduction_factor",),
        }[self.type]
        wrong = [name for name in PrunerSection.model_fields if name in self.model_fields_set - {"type", *used}]
        if wrong:
            text = f"has no effect with type: {self.type}. Remove it."
            raise reject_all([Problem((name,), text) for name in wrong])
        return self


def _of_type(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _parallel(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise reject((), f"must be a positive whole number, or auto; got {describe(value)}.", value)


class SweepConfig(Section):
    """The settings of a sweep, validated and read-only."""

    run: Annotated[str, Field(min_length=1)]
    """The file of the run, relative to this file."""
    overrides: Texts = ()
    """Settings of the run to replace in all trials, such as trainer.max_steps=200."""
    name: FolderName = "sweep"
    """The folder is output_dir/name, with output_dir of the run. Default: the name of this file without .yaml."""
    metric: Annotated[str, Field(min_length=1)]
    """The optimized metric: an evaluation set and its metric, such as valid/loss."""
    mode: Literal["min", "max"] = "min"
    """Whether lower or higher values are better."""
    value: Literal["last", "best"] = "last"
    """The value of a trial: that of its last evaluation, or its best one."""
    sampler: Annotated[SamplerSection, BeforeValidator(_of_type)] = Field(default_factory=SamplerSection)
    """How the values of the next trial are chosen."""
    trials: Count | None = None
    """The number of trials; None: all points of the grid."""
    pruner: Annotated[PrunerSection | None, BeforeValidator(_of_type)] = None
    """Which trials end early; None: no pruning."""
    parallel: Annotated[int | Literal["auto"], BeforeValidator(_parallel)] = "auto"
    """The number of trials that run at the same time; auto: one per GPU, or one on the CPU."""
    max_failures: Count = 3
    """The number of consecutive failed trials after which the sweep ends."""
    max_restarts: Annotated[Whole, Field(ge=0)] = 2
    """How often a trial that was ended by a signal is restarted; it resumes from its newest checkpoint."""
    parameters: Annotated[Frozen[Any], BeforeValidator(_parameters)]
    """The settings of the run to vary: a list of values, or {min, max, scale, step}."""

    _origins: dict[KeyPath, Origin] = PrivateAttr(default_factory=dict)
    _base: RunConfig | None = PrivateAttr(default=None)
    _run_file: Path = PrivateAttr(default_factory=Path)

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> SweepConfig:
        """Read the YAML file of a sweep, and validate it together with the run that it refers to."""
        file = Path(path)
        shown = shown_path(file)
        document = parse_file(file, shown)
        if not isinstance(document.value, dict):
            problem = "A sweep needs at least run, metric and parameters"
            raise ConfigError(f"{problem}, got {describe(document.plain())}.", where=Origin(shown, 1))
        tree = Node({"name": Node(file.stem), **document.value}, Origin(shown, 1))
        return cls._validate(apply_overrides(tree, overrides), file)

    @classmethod
    def _validate(cls, tree: Node, file: Path) -> SweepConfig:
        origins = dict(tree.origins())

        def origin_of(path: KeyPath) -> Origin | None:
            return nearest_origin(origins, path)

        try:
            sweep = cls.model_validate(tree.plain())
        except ValidationError as error:
            raise_all(explain(error, cls), origin_of)
            raise  # not reached
        raise_all([*sweep._check_trials()], origin_of)
        sweep._origins, sweep._run_file = origins, file.parent / sweep.run
        if not sweep.run_file.is_file():
            found = shown_path(sweep.run_file)
            raise ConfigError(
                f"run: there is no file {found}. The path is relative to the sweep's file.", where=origin_of(("run",))
            )
        sweep._base = RunConfig.load(sweep.run_file, sweep.overrides)
        raise_all([*sweep._check_against(sweep._base)], origin_of)
        return sweep

    def _check_trials(self) -> Iterator[Problem]:
        if self.sampler.type != "grid":
            if self.trials is None:
                yield Problem(("trials",), f"is required with the sampler {self.sampler.type}, such as trials: 20.")
            return
        for name, each in self.parameters.items():
            if isinstance(each, Range) and each.values() is None:
                text = "a grid needs a list of values, or a step; this range is continuous. Use sampler: random or tpe."
                yield Problem(("parameters", name), text)

    def _check_against(self, base: RunConfig) -> Iterator[Problem]:
        """Yield the problems with the metric, and with values that the run does not accept."""
        problem = check_metric(base, self.metric)
        if problem is not None:
            yield Problem(("metric",), problem)
        for name, each in self.parameters.items():
            values = (each.min, each.max) if isinstance(each, Range) else each
            for value in values:
                try:
                    RunConfig.load(self.run_file, [*self.overrides, override(name, value)])
                except ConfigError as error:
                    text = error.problem.splitlines()[0].removeprefix(f"{name}: ")
                    shown = yaml_text.write_inline(thaw(value))
                    yield Problem(("parameters", name), f"the run does not accept {shown}: {text}")
                    break

    def origin(self, parameter: str) -> Origin | None:
        """Return the location of a parameter."""
        return nearest_origin(self._origins, ("parameters", parameter))

    @property
    def base(self) -> RunConfig:
        """The run without the values of a trial."""
        assert self._base is not None
        return self._base

    @property
    def run_file(self) -> Path:
        """The file of the run."""
        return self._run_file

    @property
    def folder(self) -> Path:
        """The folder of the sweep, which contains the run folders of its trials."""
        return Path(self.base.output_dir) / self.name

    @property
    def num_trials(self) -> int:
        """The number of trials."""
        if self.sampler.type != "grid":
            assert self.trials is not None
            return self.trials
        size = math.prod(len(choices_of(each)) for each in self.parameters.values())
        return size if self.trials is None else min(size, self.trials)

    def grid_point(self, number: int) -> dict[str, Any]:
        """Return a point of the grid; the last parameter changes fastest."""
        points = itertools.product(*(choices_of(each) for each in self.parameters.values()))
        return dict(zip(self.parameters, next(itertools.islice(points, number, None)), strict=True))

    def trial_overrides(self, values: Mapping[str, Any], name: str) -> list[str]:
        """Return the overrides of a trial of this name: those of the sweep, and its values."""
        own = [override(setting, value) for setting, value in values.items()]
        if self.base.checkpoint.keep_best is None:
            # The run then validates the metric's name before its first step, and keeps its best checkpoint.
            own.append(f"checkpoint.keep_best={{metric: {self.metric}, mode: {self.mode}}}")
        return [*self.overrides, *own, f"name={name}"]


def choices_of(parameter: Any) -> tuple[Any, ...]:
    """Return all values of a parameter that is not continuous."""
    values = parameter.values() if isinstance(parameter, Range) else parameter
    assert values is not None
    return tuple(values)


def override(setting: str, value: Any) -> str:
    """Return the override that sets this value."""
    return f"{setting}={yaml_text.write_inline(escape_plain(thaw(value)))}"
