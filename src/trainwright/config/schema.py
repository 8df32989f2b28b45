"""`RunConfig`: all settings of a run in one read-only object, from a file, a dict, Python code or a saved run.

Files are read in files.py and python_files.py, overrides in overrides.py; the sections are declared in sections.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from trainwright.config import yaml_text
from trainwright.config.component import Component, ModelSection
from trainwright.config.elsewhere import advice_elsewhere
from trainwright.config.files import (
    ConfigDocument,
    group_reader,
    merge_files,
    read_document,
    resolve_document,
    save_document,
)
from trainwright.config.frozen import Frozen, same, thaw
from trainwright.config.groups import Group, missing
from trainwright.config.interpolation import escape_plain, interpolate
from trainwright.config.overrides import apply_overrides, parse_mapping, reject_removals, replace_at
from trainwright.config.problems import Problem, describe, explain, nearest, raise_all, reject, suggest
from trainwright.config.python_files import as_settings, as_yaml_value
from trainwright.config.required import reject_missing
from trainwright.config.sections import (
    BENCHMARK_NAME,
    BUILT_IN_TRAINERS,
    AnomaliesSection,
    CheckpointSection,
    Components,
    DataSection,
    EvaluationSection,
    LogSection,
    PreemptionSection,
    RuntimeSection,
    Section,
    Texts,
    TrainerSection,
    WatchdogSection,
    Whole,
    benchmark_name,
    empty_section,
)
from trainwright.config.trainer_options import TRAINER_OPTIONS
from trainwright.config.yaml_text import (
    KeyPath,
    Node,
    Origin,
    absolute,
    map_strings,
    merge,
    nearest_origin,
    to_tree,
)
from trainwright.errors import ConfigError
from trainwright.safe_text import mask_secrets

# Defaults that an override can change in detail: `writers.0.…=…` also works without `writers` in the file.
_DEFAULT_COMPONENTS: Mapping[str, Any] = {"writers": ["console", "json"], "data": {"collator": "stack"}}


_MAX_NAME_BYTES = 240
"""The limit for each part of a run's name: file systems allow 255 bytes, and files next to the folder have a suffix."""


def _folder_name(name: Any) -> Any:
    """Reject a name that is not a folder below output_dir, or that a terminal or a shell would show differently."""
    if not isinstance(name, str):
        return name
    parts = name.split("/")
    if name.startswith("/") or {"", ".", ".."} & {part.strip() for part in parts} or "\\" in name:
        text = f"must be a folder below output_dir, such as lm or group/lm; got {describe(name)}."
        raise reject((), text, name)
    if any(part != part.strip() or not part.isprintable() for part in parts):
        text = f"must have no control characters, and no spaces around a folder's name; got {describe(name)}."
        raise reject((), text, name)
    longest = max(len(part.encode()) for part in parts)
    if longest > _MAX_NAME_BYTES:
        text = f"must have at most {_MAX_NAME_BYTES} bytes in a folder's name, got {longest}: {describe(name)}."
        raise reject((), text, name)
    return name


FolderName: TypeAlias = Annotated[str, BeforeValidator(_folder_name)]


class RunConfig(Section):
    """All settings of a run, validated and read-only, with the origin of each.

    `==` compares settings. Sections and the arguments of components read as attributes.

    >>> config = RunConfig.from_dict({"model": {"type": "llama", "preset": "tiny"}}, overrides=["trainer.max_steps=10"])
    >>> config.model.preset, config.trainer.max_steps
    ('tiny', 10)
    """

    name: FolderName = "run"
    """The run's folder is output_dir/name. Default: the YAML file's name without .yaml."""
    output_dir: Annotated[str, Field(min_length=1)] = "runs"
    """The folder of run folders, relative to the current directory."""
    seed: Annotated[Whole, Field(ge=0)] = 42
    """The seed of all random numbers and of the order of the data."""
    imports: Texts = ()
    """Modules that register components; they are imported first."""
    task: Component | None = None
    """Defines model, datasets and forward independently of the trainer; None: the trainer's forward."""
    model: ModelSection | None = None
    """The model; None if a task or a trainer builds it."""
    data: Annotated[DataSection, BeforeValidator(empty_section)] = Field(default_factory=DataSection)
    """Datasets, and how samples become batches."""
    trainer: Annotated[TrainerSection, BeforeValidator(empty_section)] = Field(default_factory=TrainerSection)
    """How the model is updated."""
    evaluation: Annotated[EvaluationSection, BeforeValidator(empty_section)] = Field(default_factory=EvaluationSection)
    """When the evaluation sets and the benchmarks are evaluated, and with which metrics."""
    checkpoint: Annotated[CheckpointSection, BeforeValidator(empty_section)] = Field(default_factory=CheckpointSection)
    """When checkpoints are written and which are kept."""
    hooks: Components = ()
    """Callbacks around the steps, called in this order."""
    writers: Components = Field(default_factory=lambda: (Component("console"), Component("json")))
    """The writers that receive the metrics."""
    log: Annotated[LogSection, BeforeValidator(empty_section)] = Field(default_factory=LogSection)
    """How often a line is written."""
    runtime: Annotated[RuntimeSection, BeforeValidator(empty_section)] = Field(default_factory=RuntimeSection)
    """Device, precision, execution mode and mesh."""
    anomalies: Annotated[AnomaliesSection, BeforeValidator(empty_section)] = Field(default_factory=AnomaliesSection)
    """The response to losses and gradients that are not finite, and to loss spikes."""
    preemption: Annotated[PreemptionSection, BeforeValidator(empty_section)] = Field(default_factory=PreemptionSection)
    """How the run exits on a signal."""
    watchdog: Annotated[WatchdogSection, BeforeValidator(empty_section)] = Field(default_factory=WatchdogSection)
    """When a rank counts as stuck."""

    _project_dir: Path = PrivateAttr(default_factory=Path.cwd)
    _untrusted_file: str | None = PrivateAttr(default=None)
    _origins: dict[KeyPath, Origin] = PrivateAttr(default_factory=dict)
    _groups: tuple[Group, ...] = PrivateAttr(default=())

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = (), *, trust: bool | None = None
    ) -> RunConfig:
        """Read a YAML file, the files that it extends and the overrides (`a.b=value`, `~a.b`), and validate the result.

        The name of a group file, as in `trainer=lm-xl`, is replaced with its contents; `${a.b}` refers to another
        setting. A config.yaml of a run folder that was not written by this user is read, but the code that it names is
        not imported unless `trust` is True. False treats every file like that of a run folder.
        """
        document = read_document(path, trust=trust)
        return cls._assemble(document, overrides, name=Path(path).stem)

    @classmethod
    def from_dict(
        cls,
        settings: Mapping[str, Any],
        overrides: Iterable[str] = (),
        project_dir: str | os.PathLike[str] = ".",
        where: Origin | None = None,
    ) -> RunConfig:
        """Create a config from plain settings, with the same validation; components may be `Component`s.

        `where` is the origin of the settings, for errors. A value may be a `Node` with another origin.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"A config must be a mapping (key: value), got {describe(settings)}.")
        folder = absolute(project_dir)
        tree = to_tree(Node(as_yaml_value(settings, (), {} if where is None else {(): where}), where), {})
        return cls._assemble(resolve_document(tree, folder), overrides)

    def derive(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a validated copy with the values at these dotted paths replaced; origins are kept."""
        document = self._document()
        tree = document.settings
        for dotted, value in values.items():
            path = tuple(dotted.split("."))
            tree = replace_at(tree, path, to_tree(as_yaml_value(value, path, {}), self._origins, path))
        return self._validate(replace(document, settings=tree))

    def masked(self) -> RunConfig:
        """Return a copy without the passwords and tokens in its URLs; the config itself if it has none."""
        document = self._document()
        masked = map_strings(document.settings, mask_secrets)
        return self if masked == document.settings else self._validate(replace(document, settings=masked))

    def _document(self) -> ConfigDocument:
        tree = to_tree(self.to_dict(), self._origins)
        return ConfigDocument(tree, self.project_dir, self._untrusted_file, self._groups)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every setting and the project's folder as YAML; `load` returns an equal config.

        The file is signed with this user's key, unless the settings come from an untrusted run folder.
        """
        settings = {"project_dir": str(self.project_dir), **escape_plain(_worth_writing(self))}
        save_document(path, settings, is_signed=self._untrusted_file is None)

    def to_yaml(self) -> str:
        """Return every setting as YAML, including defaults."""
        return yaml_text.write(escape_plain(_worth_writing(self)))

    @property
    def project_dir(self) -> Path:
        """The folder of the YAML file; component files are relative to it."""
        return self._project_dir

    @property
    def untrusted_file(self) -> str | None:
        """The config.yaml of a run folder that is the source of the settings and is not signed by this user; None if
        trusted."""
        return self._untrusted_file

    @property
    def groups(self) -> tuple[Group, ...]:
        """The group files whose names the settings use."""
        return self._groups

    def origin(self, dotted: str) -> Origin | None:
        """Return the location of the setting, or of the nearest key above it; None for a config created in Python."""
        path = tuple(dotted.split("."))
        return self.written_at(path) or nearest_origin(self._origins, path)

    def written_at(self, path: KeyPath) -> Origin | None:
        """Return the location of exactly this setting; None for a default or a config created in Python."""
        keys = tuple(map(str, path))
        if keys[:3] == ("data", "eval", "eval") and keys[:3] not in self._origins:
            keys = ("data", "eval", *keys[3:])  # a bare component gets the name eval
        if keys in self._origins:
            return self._origins[keys]
        # A component written as a bare type: `writers: [console]`.
        is_bare_type = keys[-1:] == ("type",) and keys != ("trainer", "type")
        return self._origins.get(keys[:-1]) if is_bare_type else None

    def __eq__(self, other: object) -> bool:
        return same(self.to_dict(), other.to_dict()) if isinstance(other, RunConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # settings hold mappings, which have no hash

    @classmethod
    def _assemble(cls, document: ConfigDocument, overrides: Iterable[str], *, name: str | None = None) -> RunConfig:
        """Apply the overrides, resolve the references and validate the result; `name` is the run's default name."""
        reject_removals(document.settings)
        defaults = _DEFAULT_COMPONENTS if name is None else {"name": name, **_DEFAULT_COMPONENTS}
        groups = group_reader(document.project_dir)
        tree = apply_overrides(merge(to_tree(defaults, {}), document.settings), overrides, groups.expand)
        reject_removals(tree)
        reject_missing(tree)
        tree = interpolate(tree, to_tree(cls().to_dict(), {}), untrusted_file=document.untrusted_file)
        _reject_unknown_groups(tree, document.project_dir)
        return cls._validate(replace(document, settings=tree, groups=(*document.groups, *groups.used)))

    @classmethod
    def _validate(cls, document: ConfigDocument) -> RunConfig:
        """Return the config of resolved settings; raises all problems in one error."""
        tree = merge(to_tree(_DEFAULT_COMPONENTS, {}), document.settings)
        origins = dict(tree.origins())
        settings = tree.plain()
        problems = _check_trainer_keys(settings.get("trainer"))
        try:
            config = cls.model_validate(settings)
        except ValidationError as error:
            problems += explain(error, cls)
        else:
            problems += [*_check_keep_best(config), *_check_requeue(config), *_check_sampler(config)]
            problems += _check_benchmarks(config)
        raise_all(problems, lambda path: nearest_origin(origins, path))
        located = _locate(config, (), lambda path: nearest_origin(origins, path))
        located._origins = origins
        located._project_dir = document.project_dir
        located._untrusted_file = document.untrusted_file
        located._groups = document.groups
        return located  # type: ignore[no-any-return]  # _locate returns the type that it receives


def _reject_unknown_groups(tree: Node, folder: Path) -> None:
    """Reject text in place of a mapping, with the names of the group files."""
    problems = []
    for name, field in RunConfig.model_fields.items():
        node = tree.value.get(name)
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        if is_section and node is not None and isinstance(node.value, str):
            problems.append(Problem((name,), missing(node.value, folder, (name,))))
    raise_all(problems, lambda path: tree.value[path[0]].origin)


# Chosen from real misspellings: max_step and optimiser are above it, options such as num_steps or warmup_steps below.
_MISSPELLING = 0.8


def _check_trainer_keys(trainer: Any) -> list[Problem]:
    """Reject unknown keys of the raw trainer section; a custom trainer may have options with dissimilar names."""
    if not isinstance(trainer, Mapping):
        return []
    name = trainer.get("type", "trainer")
    is_built_in = name in BUILT_IN_TRAINERS
    options = TRAINER_OPTIONS.get(name) if isinstance(name, str) else None
    known = [*TrainerSection.model_fields, *([] if options is None else options.model_fields)]
    problems = [] if options is None else check_options(options, trainer)
    for key in (key for key in trainer if key not in known):
        match = nearest(key, known, cutoff=_MISSPELLING)
        elsewhere = advice_elsewhere(key, is_own=not is_built_in)
        if elsewhere is not None:
            problems.append(Problem(("trainer", key), f"has no effect here. {elsewhere}"))
        elif is_built_in:
            text = f"there is no such setting. {suggest(key, known)} Only a custom trainer has further options."
            problems.append(Problem(("trainer", key), text))
        elif match is not None:
            text = f'looks like a misspelled "{match}". Use that name, or a less similar one for your own option.'
            problems.append(Problem(("trainer", key), text))
    return problems


def check_options(options: type[Section], trainer: Mapping[str, Any]) -> list[Problem]:
    """Return the problems with the options of a trainer in a trainer section."""
    given = {key: value for key, value in trainer.items() if key in options.model_fields}
    try:
        options.model_validate(given)
    except ValidationError as error:
        return [Problem(("trainer", *problem.path), problem.text) for problem in explain(error, options)]
    return []


def _check_keep_best(config: RunConfig) -> list[Problem]:
    if config.checkpoint.keep_best is None:
        return []
    problem = check_metric(config, config.checkpoint.keep_best.metric)
    return [] if problem is None else [Problem(("checkpoint", "keep_best", "metric"), problem)]


def check_metric(config: RunConfig, name: str) -> str | None:
    """Return the problem with the name of a metric that selects a checkpoint or a run; None if there is none."""
    set_name, slash, metric = name.partition("/")
    data = config.data
    sets = list(data.eval) or [name for name in data.cut_off if name != "test"]
    example = f"{sets[0] if sets else 'valid'}/loss"
    sets += [benchmark_name(each) for each in config.evaluation.benchmarks]
    if not slash or not set_name or not metric:
        return f"must be a set and its metric, such as {example}; got {describe(name)}."
    if set_name == "test":
        return f"the test set cannot select a checkpoint. Use an evaluation set, such as {example}."
    # A custom task or trainer may build further sets; build/ then checks the name.
    sets_are_known = config.trainer.type in BUILT_IN_TRAINERS and config.task is None and data.train is not None
    if set_name in sets or not (sets or sets_are_known):
        return None
    advice = suggest(set_name, sets) if sets else "Add it to data.eval, or set data.split."
    return f'there is no evaluation set "{set_name}". {advice}'


def _check_benchmarks(config: RunConfig) -> list[Problem]:
    problems = []
    taken = {*config.data.eval, *config.data.cut_off, "test"}
    for number, each in enumerate(config.evaluation.benchmarks):
        path, name = ("evaluation", "benchmarks", number), benchmark_name(each)
        if not BENCHMARK_NAME.fullmatch(name):
            text = f'"{name}" is not a name of letters, digits, dots, dashes and underscores. Set name.'
            problems.append(Problem(path, text))
        elif name in taken:
            problems.append(Problem(path, f'there is another set or benchmark "{name}". Set another name.'))
        taken.add(name)
        for key, least in (("batch_size", 1), ("log_samples", 0)):
            value = each.arguments.get(key, least)
            if type(value) is not int or value < least:
                text = f"must be a whole number of at least {least}, got {describe(value)}."
                problems.append(Problem((*path, key), text))
    return problems


def _check_sampler(config: RunConfig) -> list[Problem]:
    data = config.data
    if data.sampler is None:
        return []
    problems = []
    if data.shuffle:
        text = "true contradicts data.sampler, which defines the order of the samples. Remove one of the two."
        problems.append(Problem(("data", "shuffle"), text))
    if data.group_by_length:
        text = "has no effect, because data.sampler defines the order of the samples. Remove one of the two."
        problems.append(Problem(("data", "group_by_length"), text))
    return problems


def _check_requeue(config: RunConfig) -> list[Problem]:
    if not config.preemption.requeue or config.checkpoint.contents == "full":
        return []
    text = (
        "the requeued job could not resume, because checkpoint.contents is weights. Use contents: full, or remove one."
    )
    return [Problem(("preemption", "requeue"), text)]


def _locate(value: Any, path: KeyPath, origin_of: Callable[[KeyPath], Origin | None]) -> Any:
    """Return `value` with the origin of every Component; arguments of components are not changed."""
    if isinstance(value, Component):
        return value.located_at(origin_of((*path, "type")))  # an override may have replaced the class
    if isinstance(value, tuple):
        return tuple(_locate(item, (*path, index), origin_of) for index, item in enumerate(value))
    if isinstance(value, Frozen):
        return Frozen({key: _locate(item, (*path, key), origin_of) for key, item in value.items()})
    if isinstance(value, Section):
        fields = {name: _locate(getattr(value, name), (*path, name), origin_of) for name in type(value).model_fields}
        return value.model_copy(update=fields)
    return value


def _worth_writing(section: Section) -> dict[str, Any]:
    """Return the settings of a saved file: all except None and empty mappings that are the default."""
    fresh = type(section).model_fields
    written: dict[str, Any] = {}
    for name, value in section:
        if isinstance(value, Section):
            value = _worth_writing(value)
        empty_default = name in fresh and not fresh[name].is_required() and fresh[name].get_default() is None
        if (value is None and empty_default) or (value == {} and name in fresh):
            continue
        written[name] = thaw(value)
    return written


def layered_config(
    result: Any,
    *,
    name: str,
    folder: Path,
    where: Origin,
    files: Iterable[str | os.PathLike[str]] = (),
    overrides: Iterable[str] = (),
) -> RunConfig:
    """Return the config of a RunConfig or a mapping that was created by code at `where`, with files and overrides
    merged.

    `name` is the default name of the run, and `folder` the default project folder. Overrides are `a.b=value`, or YAML
    mappings, which are merged first.
    """
    known = result._origins if isinstance(result, RunConfig) else {}  # of the files that it was loaded from
    settings = to_tree(as_settings(result, {(): where}), {(): where, **known})
    untrusted_file = result.untrusted_file if isinstance(result, RunConfig) else None
    document, single = merge_files(resolve_document(settings, folder, untrusted_file=untrusted_file), files), []
    for text in overrides:
        if text.lstrip().startswith("{"):
            groups = group_reader(document.project_dir)
            settings = merge(document.settings, groups.expand(parse_mapping(text)))
            document = replace(document, settings=settings, groups=(*document.groups, *groups.used))
        else:
            single.append(text)
    return RunConfig._assemble(document, single, name=name)
