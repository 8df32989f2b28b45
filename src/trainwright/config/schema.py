"""`RunConfig`: a run in one read-only object, and the ways to get one: a file, a dict, Python code, a saved run.

Files are read in files.py and python_files.py, overrides in overrides.py; the sections are declared in sections.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from trainwright.config import yaml_text
from trainwright.config.checks import check_across, check_trainer_keys
from trainwright.config.component import Component, ModelSection
from trainwright.config.files import ConfigDocument, lay_over, read_document, resolve_document, save_document
from trainwright.config.frozen import Frozen, plain_scalar, same, thaw
from trainwright.config.overrides import apply_overrides, replace_at
from trainwright.config.problems import Problem, describe, explain, raise_all, reject
from trainwright.config.python_files import as_settings
from trainwright.config.sections import (
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
    empty_section,
)
from trainwright.config.yaml_text import KeyPath, Node, Origin, absolute, merge, plant
from trainwright.errors import ConfigError

# Defaults that an override may reach into: `writers.0.…=…` works whether or not the file has the key.
_DEFAULT_COMPONENTS: Mapping[str, Any] = {"writers": ["console", "json"], "data": {"collator": "stack"}}


def _folder_name(name: Any) -> Any:
    if isinstance(name, str) and (not name.strip() or Path(name).is_absolute() or ".." in Path(name).parts):
        text = f"names the run's folder under output_dir, so it is a relative path without ..; got {describe(name)}."
        raise reject((), text, name)
    return name


class RunConfig(Section):
    """What a run is: every setting, checked and read-only, with the place where each was written."""

    name: Annotated[str, BeforeValidator(_folder_name)] = "run"
    """The run's folder is output_dir/name. Default: the YAML file's name without .yaml."""
    output_dir: Annotated[str, Field(min_length=1)] = "runs"
    """Where run folders are; relative to the current folder."""
    seed: Annotated[Whole, Field(ge=0)] = 42
    """All randomness and the order of data follow from it."""
    imports: Texts = ()
    """Modules to import first, because they register components."""
    task: Component | None = None
    """What is learned, apart from how; None: the trainer's own forward."""
    model: ModelSection | None = None
    """The architecture; None where a task or a trainer builds it."""
    data: Annotated[DataSection, BeforeValidator(empty_section)] = Field(default_factory=DataSection)
    """Where samples come from and how they become batches."""
    trainer: Annotated[TrainerSection, BeforeValidator(empty_section)] = Field(default_factory=TrainerSection)
    """How the model is updated."""
    evaluation: Annotated[EvaluationSection, BeforeValidator(empty_section)] = Field(default_factory=EvaluationSection)
    """When the evaluation sets are measured, and by what."""
    checkpoint: Annotated[CheckpointSection, BeforeValidator(empty_section)] = Field(default_factory=CheckpointSection)
    """When checkpoints are written and which are kept."""
    hooks: Components = ()
    """Optional acts around the steps, called in this order."""
    writers: Components = Field(default_factory=lambda: (Component("console"), Component("json")))
    """Who is told what happened."""
    log: Annotated[LogSection, BeforeValidator(empty_section)] = Field(default_factory=LogSection)
    """How often a line is written."""
    runtime: Annotated[RuntimeSection, BeforeValidator(empty_section)] = Field(default_factory=RuntimeSection)
    """On what and how the steps run."""
    anomalies: Annotated[AnomaliesSection, BeforeValidator(empty_section)] = Field(default_factory=AnomaliesSection)
    """What happens when a loss or gradient goes wrong."""
    preemption: Annotated[PreemptionSection, BeforeValidator(empty_section)] = Field(default_factory=PreemptionSection)
    """How the run leaves when it is told to."""
    watchdog: Annotated[WatchdogSection, BeforeValidator(empty_section)] = Field(default_factory=WatchdogSection)
    """When a rank is taken for stuck."""

    _project_dir: Path = PrivateAttr(default_factory=Path.cwd)
    _origins: dict[KeyPath, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> RunConfig:
        """Read a YAML file, all that it extends and the overrides (`a.b=value`), and check everything."""
        document = read_document(path)
        named = merge(plant({"name": Path(path).stem}, {}), document.settings)
        return cls._assemble(ConfigDocument(named, document.project_dir), overrides)

    @classmethod
    def from_dict(
        cls,
        settings: Mapping[str, Any],
        overrides: Iterable[str] = (),
        project_dir: str | os.PathLike[str] = ".",
        where: Origin | None = None,
    ) -> RunConfig:
        """Make a config from plain settings, under the same checks; components may be `Component`s.

        `where` is the origin of the settings, for errors. A value may be a `Node` with an origin of its own.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"A config must be a mapping (key: value), got {describe(settings)}.")
        folder = absolute(project_dir)
        tree = plant(Node(_plain(settings, where=where), where), {})
        return cls._assemble(resolve_document(tree, folder), overrides)

    def derive(self, values: Mapping[str, Any]) -> RunConfig:
        """Return a copy with the values at these dotted paths, checked again; origins are kept."""
        tree = plant(self.to_dict(), self._origins)
        for dotted, value in values.items():
            path = tuple(dotted.split("."))
            tree = replace_at(tree, path, plant(_plain(value, path), self._origins, path))
        return self._assemble(ConfigDocument(tree, self.project_dir), ())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write every setting and the project's folder as YAML; `load` reads an equal config back."""
        save_document(path, {"project_dir": str(self.project_dir), **_worth_writing(self)})

    def to_yaml(self) -> str:
        """Return every setting as YAML text, defaults included."""
        return yaml_text.write(_worth_writing(self))

    @property
    def project_dir(self) -> Path:
        """The folder of the YAML file that was given: components' files are relative to it."""
        return self._project_dir

    def origin(self, dotted: str) -> Origin | None:
        """Return where the setting was written, or the nearest key above it; None for a config made in Python."""
        path = tuple(dotted.split("."))
        return self.written_at(path) or _nearest_origin(self._origins, path)

    def written_at(self, path: KeyPath) -> Origin | None:
        """Return where exactly this setting was written; None where it has its default, or was made in Python."""
        words = tuple(map(str, path))
        if words[:3] == ("data", "eval", "eval") and words[:3] not in self._origins:
            words = ("data", "eval", *words[3:])  # one bare component, which was given its name here
        if words in self._origins:
            return self._origins[words]
        # A component written as its bare type: `writers: [console]`.
        is_bare_type = words[-1:] == ("type",) and words != ("trainer", "type")
        return self._origins.get(words[:-1]) if is_bare_type else None

    def __eq__(self, other: object) -> bool:
        return same(self.to_dict(), other.to_dict()) if isinstance(other, RunConfig) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # settings hold mappings, which have no hash

    @classmethod
    def _assemble(cls, document: ConfigDocument, overrides: Iterable[str]) -> RunConfig:
        """Check a whole tree and return its config; all problems are raised in one error."""
        tree = apply_overrides(merge(plant(_DEFAULT_COMPONENTS, {}), document.settings), overrides)
        origins = dict(tree.origins())
        settings = tree.plain()
        problems = check_trainer_keys(settings.get("trainer"))
        try:
            config = cls.model_validate(settings)
        except ValidationError as error:
            problems += explain(error, cls)
        else:
            problems += check_across(
                data=config.data,
                trainer=config.trainer,
                keep_best=config.checkpoint.keep_best,
                mesh=config.runtime.mesh,
                task=config.task,
            )
        raise_all(problems, lambda path: _nearest_origin(origins, path))
        return config._remembering(origins, document.project_dir)

    def _remembering(self, origins: dict[KeyPath, Origin], project_dir: Path) -> RunConfig:
        """Return the same settings, with each component knowing where it was written."""
        located = _locate(self, (), lambda path: _nearest_origin(origins, path))
        located._origins = origins
        located._project_dir = project_dir
        return located  # type: ignore[no-any-return]  # _locate returns what it is given


def _nearest_origin(origins: Mapping[KeyPath, Origin], path: KeyPath) -> Origin | None:
    words = tuple(map(str, path))
    return next((origins[words[:end]] for end in range(len(words), -1, -1) if words[:end] in origins), None)


def _locate(value: Any, path: KeyPath, origin_of: Callable[[KeyPath], Origin | None]) -> Any:
    """Return `value` with every Component in it located; arguments are left alone."""
    if isinstance(value, Component):
        return value.located_at(origin_of((*path, "type")))  # an override may have named another class
    if isinstance(value, tuple):
        return tuple(_locate(item, (*path, index), origin_of) for index, item in enumerate(value))
    if isinstance(value, Frozen):
        return Frozen({key: _locate(item, (*path, key), origin_of) for key, item in value.items()})
    if isinstance(value, Section):
        fields = {name: _locate(getattr(value, name), (*path, name), origin_of) for name in type(value).model_fields}
        return value.model_copy(update=fields)
    return value


def _worth_writing(section: Section) -> dict[str, Any]:
    """Return what a saved file holds: everything but what is empty and would be read as the same by default."""
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


def _plain(value: Any, path: KeyPath = (), where: Origin | None = None) -> Any:
    """Return a Python value as YAML would hold it, or reject it by name: a saved run must read back equal."""
    if isinstance(value, Node):
        return Node(_plain(value.value, path, value.origin), value.origin)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        raise_all(
            [Problem(path, f"a key must be text, got {key!r}. Use {str(key)!r}.") for key in wrong], lambda _: where
        )
        return {str(key): _plain(item, (*path, key), where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, (*path, index), where) for index, item in enumerate(value)]
    if isinstance(value, Section):
        return _plain(value.to_dict(), path, where)
    plain = plain_scalar(value)
    if value is not None and plain is None:
        text = f"a {type(value).__name__} cannot be saved as YAML: {value!r}. Use text, numbers, lists or mappings."
        raise_all([Problem(path, text)], lambda _: where)
    return plain


def layered_config(
    made: Any,
    *,
    name: str,
    folder: Path,
    where: Origin,
    files: Iterable[str | os.PathLike[str]] = (),
    overrides: Iterable[str] = (),
) -> RunConfig:
    """Return what code at `where` has made, a RunConfig or a mapping, with files and overrides over it.

    `name` is for a run that gives none, and `folder` is where relative files start, unless the RunConfig has its own.
    Overrides are `a.b=value`, or YAML mappings, which are laid over before those.
    """
    known = made._origins if isinstance(made, RunConfig) else {}  # those of the files that it was loaded from
    settings = merge(plant({"name": name}, {}), plant(as_settings(made, {(): where}), {(): where, **known}))
    document, single = lay_over(resolve_document(settings, folder), files), []
    for text in overrides:
        if text.lstrip().startswith("{"):
            document = ConfigDocument(merge(document.settings, _mapping(text)), document.project_dir)
        else:
            single.append(text)
    return RunConfig._assemble(document, single)


def _mapping(text: str) -> Node:
    where = Origin(f"override {text}", 0)
    return yaml_text.parse(text, lambda line: where)
