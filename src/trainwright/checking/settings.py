"""The first two stages: the config itself, then every component that it names and each of its arguments.

Nothing is built here. All problems are noted, not only the first; a file that several components name is
reported once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainwright import registry
from trainwright.checking import places
from trainwright.checking.explain import Case, culprits, from_words
from trainwright.checking.findings import Findings
from trainwright.config import Component, Origin, RunConfig, resolve_batch
from trainwright.errors import ConfigError
from trainwright.models.model import Model
from trainwright.models.transformers_models import is_transformers_class
from trainwright.user_code import parameters_of

_LOCATED = re.compile(r"(?P<file>.+?):(?P<line>\d+): (?P<words>.*)")


class Named(NamedTuple):
    """A component of the config: its kind, where it stands, and what the builder adds to its arguments."""

    kind: str
    label: str
    type: str
    arguments: Mapping[str, Any]
    provided: tuple[str, ...] = ()


def load_config(path: str | os.PathLike[str], overrides: Sequence[str], findings: Findings) -> RunConfig | None:
    """Returns the config, or None where it cannot be read; then each of its problems is a finding."""
    try:
        return RunConfig.load(path, overrides)
    except ConfigError as error:
        first, *others = error.problem.split("\n")
        where = error.where if isinstance(error.where, Origin) else None
        findings.add(from_words("error", first, places.of_setting(where, culprits(first))))
        for line in others:
            origin, words = _split_origin(line, overrides)
            findings.add(from_words("error", words, places.of_setting(origin, culprits(words))))
        return None


def check_components(case: Case) -> int:
    """Finds the class of every component and compares its arguments; returns how many components there are."""
    config = case.config
    for number, module in enumerate(config.imports):
        try:
            registry.import_modules([module], project_dir=config.project_dir)
        except Exception as error:
            case.note(error, label=f"imports.{number}")
    components = list(_components(config))
    for each in components:
        where = config.origin(f"{each.label}.type")
        try:
            target = registry.find(
                each.kind,
                each.type,
                project_dir=config.project_dir,
                where=where,
                label=each.label.removesuffix(".type"),
            )
        except Exception as error:
            case.note(error, label=each.label)
            continue
        case.users.include(target)
        if each.kind != "trainer":  # its section is no list of arguments: its keys were checked with the config
            _check_arguments(target, each, case)
    if case.findings.count("error"):  # else the build finds it, and goes on with a batch that fits
        try:
            resolve_batch(config, 1)
        except ConfigError as error:
            case.note(error, label="trainer")
    return len(components)


def _check_arguments(target: Callable[..., Any], named: Named, case: Case) -> None:
    """Notes each argument that the class does not take at its own line, and all that it lacks at the component's."""
    signature = parameters_of(target)
    if signature is None:
        return  # building it will tell
    parameters = signature.values()
    if named.kind == "model" and isinstance(target, type) and is_transformers_class(target):
        return  # it takes a config, whose keywords stand in the run file: building it will tell
    provided = (*named.provided, "project_dir")
    if named.kind == "model" and ("preset" in named.arguments or _is_pretrained(case.config)):
        provided = (*provided, *(one.name for one in parameters))  # what the run file leaves out is known from there
    # Stand-ins for what is needed, so that each wrong argument is told of by itself, with all parameters.
    by_name = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    needed = {one.name: None for one in by_name if one.default is one.empty and one.name not in provided}
    known = {}
    elsewhere = _read_elsewhere(named.kind, target)
    for name, value in named.arguments.items():
        if name in elsewhere:
            continue
        where = case.config.origin(f"{named.label}.{name}")
        arguments = {**needed, name: value}
        try:
            registry.check_arguments(target, arguments, label=named.label, where=where, provided=provided)
            known[name] = value
        except ConfigError as error:
            case.note(error, label=named.label)
    try:
        where = case.config.origin(named.label)
        registry.check_arguments(target, known, label=named.label, where=where, provided=provided)
    except ConfigError as error:
        case.note(error, label=named.label)


def _is_pretrained(config: RunConfig) -> bool:
    return config.model is not None and "pretrained" in config.model.reserved


def _read_elsewhere(kind: str, target: Callable[..., Any]) -> tuple[str, ...]:
    """Returns arguments that the builder reads, and that no constructor takes."""
    if kind == "optimizer":
        return ("groups",)
    is_ours = isinstance(target, type) and issubclass(target, Model)
    return ("preset",) if kind == "model" and is_ours else ()


def _components(config: RunConfig) -> Iterator[Named]:
    trainer, data = config.trainer, config.data
    if config.task is not None:
        yield _named("task", "task", config.task)
    if config.model is not None:
        yield _named("model", "model", config.model)
    if data.train is not None:
        yield _named("dataset", "data.train", data.train)
    for name, dataset in data.eval.items():
        yield _named("dataset", f"data.eval.{name}", dataset)
    if data.test is not None:
        yield _named("dataset", "data.test", data.test)
    yield _named("collator", "data.collator", data.collator)
    yield Named("trainer", "trainer", trainer.type, {})
    if trainer.optimizer is not None:
        yield _named("optimizer", "trainer.optimizer", trainer.optimizer, "params")
    if trainer.schedule is not None:
        yield _named("schedule", "trainer.schedule", trainer.schedule)
    for name, entry in trainer.optimizers.items():
        yield _named("optimizer", f"trainer.optimizers.{name}.optimizer", entry.optimizer, "params")
        if entry.schedule is not None:
            yield _named("schedule", f"trainer.optimizers.{name}.schedule", entry.schedule)
    for name, metric in config.evaluation.metrics.items():
        arguments = {key: value for key, value in metric.arguments.items() if key not in ("outputs", "labels")}
        yield Named("metric", f"evaluation.metrics.{name}", metric.type, arguments)
    for number, hook in enumerate(config.hooks):
        yield _named("hook", f"hooks.{number}", hook)
    for number, writer in enumerate(config.writers):
        yield _named("writer", f"writers.{number}", writer, "folder")


def _named(kind: str, label: str, component: Component, *provided: str) -> Named:
    return Named(kind, label, component.type, component.arguments, provided)


def _split_origin(line: str, overrides: Sequence[str]) -> tuple[Origin | None, str]:
    """Takes apart one line of a ConfigError that tells of several problems: where, and what."""
    for override in overrides:
        if line.startswith(f"override {override}: "):
            return Origin(f"override {override}", 0), line.removeprefix(f"override {override}: ")
    found = _LOCATED.fullmatch(line)
    return (Origin(found["file"], int(found["line"])), found["words"]) if found else (None, line)
