"""Builds a model from the `model` section: build, load pretrained weights, replace, adapt, freeze, in this order."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from trainwright.config import Component, ModelSection
from trainwright.config.frozen import thaw
from trainwright.config.problems import describe, suggest
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, preset_settings
from trainwright.models.names import matched_parameters, names_module, unmatched
from trainwright.models.pretrained import (
    CONFIG_FILE,
    LoadReport,
    as_dtype,
    find_folder,
    load_weights,
    on_meta,
    read_config_file,
)
from trainwright.models.pretrained_facts import (
    PretrainedFacts,
    gather_facts,
    give_dtypes,
    give_generation,
    read_generation,
)
from trainwright.models.transformers_models import DTYPE_NAMES, build_transformers, is_transformers_class
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import parameters_of


def freeze(model: nn.Module, globs: Any) -> list[str]:
    """Freezes every parameter whose name one of the globs matches; returns the names.

    A glob that matches no parameter is rejected. A tied parameter is frozen by either of its names, at both places.
    """
    names = matched_parameters("freeze", globs, model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        own[name].requires_grad_(False)
    return names


Make = Callable[[Any, nn.Module], nn.Module]
"""Makes the module that a rule describes, given the one that it replaces."""


def replace_modules(model: nn.Module, rules: Mapping[str, Any], make: Make) -> list[str]:
    """Replaces each sub-module that a rule's glob matches by `make(component, old)`; returns their names.

    Where a glob matches a module and another inside of it, the outer one is meant. Two rules that claim one place,
    or one inside the other, are rejected, as is a rule that matches nothing; then nothing has been changed. The order
    of the rules has no effect: modules are made in the model's order. A module that stands at two places is replaced
    by one. The new modules are in training or evaluation mode as the old ones were; nothing else is taken over, so a
    weight that was tied to the old one is no longer tied.
    """
    places = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    owners = _claim(places, rules)
    made: dict[int, nn.Module] = {}
    claimed_by: dict[int, str] = {}
    for name in (name for name in places if name in owners):
        old, glob = places[name], owners[name]
        if claimed_by.setdefault(id(old), glob) != glob:
            raise ConfigError(
                f'replace: "{claimed_by[id(old)]}" and "{glob}" claim one module, which the model has at two places, '
                f"one of them {name}. Let one rule match both."
            )
        if id(old) not in made:
            new = make(rules[glob], old)
            if not isinstance(new, nn.Module):
                raise ConfigError(f'replace: "{glob}" gives a {type(new).__name__}, not a torch.nn.Module, for {name}.')
            made[id(old)] = new.train(old.training)
    # Placed only when all are made: a constructor that fails leaves the model as it was.
    for name in owners:
        model.set_submodule(name, made[id(places[name])])
    return [name for name in places if name in owners]


def claimed_modules(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, str]:
    """Returns which rule's glob owns which module, in the model's order, without making or replacing one."""
    places = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    owners = _claim(places, rules)
    return {name: owners[name] for name in places if name in owners}


def _claim(places: Mapping[str, nn.Module], rules: Mapping[str, Any]) -> dict[str, str]:
    """Returns which rule owns which place."""
    owners: dict[str, str] = {}
    for glob in rules:
        matched = {name for name in places if names_module(glob, name)}
        if not matched:
            raise ConfigError(f"replace: {unmatched(glob, places, 'module')}")
        for name in sorted(matched):
            if any(outer in matched for outer in _outer_modules(name)):
                continue
            if name in owners:
                raise ConfigError(
                    f'replace: "{owners[name]}" and "{glob}" both claim {name}. Make one of them narrower.'
                )
            owners[name] = glob
    for name, glob in owners.items():
        for outer in _outer_modules(name):
            if outer in owners:
                raise ConfigError(
                    f'replace: "{glob}" claims {name}, which is inside of {outer}, which "{owners[outer]}" claims. '
                    "Remove one of them."
                )
    return owners


def _outer_modules(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


PRETRAINED_KEYS = ("folder", "strict", "home_path", "dtype", "allow_pickle")


def build_model_section(
    section: ModelSection,
    *,
    project_dir: Path,
    origin: registry.OriginOf,
    kept: PretrainedFacts | None = None,
    reader: str | None = None,
) -> tuple[nn.Module, PretrainedFacts | None]:
    """Builds the model that a `model` section describes, on the CPU, in training mode.

    Also returns what its pretrained folder told, None where it has none. With `kept`, which is what an earlier start
    got so, the folder is not looked for and no weights are loaded: others follow, from a checkpoint. It is needed and
    loaded again where `reader`, a user's code that gets the model next, or a replacement that asks for what it
    replaces may have made something from the loaded weights that no checkpoint holds.
    What was drawn at random (a head that the pretrained files lack, what a replacement brought) is trained also
    beside adapters, which freeze the rest: frozen, it would stay noise.
    """
    reserved = section.reserved
    pretrained = _read_pretrained(reserved.get("pretrained"), project_dir, origin)
    rules = _rules(reserved["replace"], origin) if "replace" in reserved else {}
    generators = _Generators()
    section, target = _find(section, project_dir)
    component: Component = section
    dtype = _read_dtype(reserved.get("dtype"), pretrained, origin)
    if dtype is not None and pretrained is not None:
        pretrained, dtype = replace(pretrained, dtype=dtype, has_dtype=True), None
    elif dtype is not None and _takes_dtype(target):
        component, dtype = _with_dtype(section, dtype), None
    readers = [rule.type for rule in rules.values() if _asks_for_replaced(rule, project_dir)]
    # A user's file may draw while it is imported, which happens at the first start in a process and not at a second.
    generators.restore()
    if pretrained is None:
        model, facts = _build(component, target, project_dir, origin), None
        _cast_parameters(model, dtype)
    else:
        if kept is not None:
            pretrained = replace(pretrained, reader=reader or next(iter(readers), None))
        model, facts = _build_pretrained(section, target, project_dir, pretrained, origin, kept)
        # Loading draws less than building does. What follows may keep numbers that no checkpoint holds (a computed
        # buffer of a replacement), and draws the same ones at every start.
        generators.restore()
    drawn = [] if facts is None else list(facts.report.missing)
    if rules:
        with _located("model.", origin("model.replace")):
            replaced = replace_modules(model, rules, _maker(project_dir))
        drawn += [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{one}." for one in replaced))]
    if "lora" in reserved:
        settings = _lora_settings(reserved["lora"], origin)
        with _located("model.", origin("model.lora"), origin=origin):
            add_lora(model, **settings)
        own = dict(model.named_parameters(remove_duplicate=False))
        for name in own.keys() & set(drawn):
            own[name].requires_grad_(True)
    freeze_own: Callable[[], Any] | None = getattr(model, "disable_untrainable_params", None)
    if freeze_own is not None:
        freeze_own()  # a model that knows itself what is not to be trained
    if "freeze" in reserved:
        with _located("model.", origin("model.freeze")):
            freeze(model, reserved["freeze"])
    return model, facts


def _cast_parameters(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Gives the parameters another type and leaves buffers, such as tables of angles, as they are."""
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def is_as_shipped(section: ModelSection, *, project_dir: Path) -> bool:
    """Does this section build one of our own classes, without a user's code in it?

    Then building it is making its tensors and nothing else, and it may be done without memory. Adapters and frozen
    parameters are ours too; a user's class or replacement may compute from weights, or draw beside them.
    """
    generators = _Generators()
    _, target = _find(section, project_dir)
    generators.restore()  # as above: a file may draw while it is imported
    return (
        isinstance(target, type)
        and issubclass(target, Model)
        and target.is_shipped()
        and "replace" not in section.reserved
    )


def build_without_memory(
    section: ModelSection, *, project_dir: Path, origin: registry.OriginOf, kept: PretrainedFacts | None
) -> nn.Module:
    """Builds the model of a section that is as shipped on the meta device: names, sizes and dtypes, and no values.

    `kept` is what the pretrained folder told the rank that has the values; None where the section has none.
    """
    with on_meta():
        return build_model_section(section, project_dir=project_dir, origin=origin, kept=kept)[0]


def _build(section: Component, target: Any, project_dir: Path, origin: registry.OriginOf) -> nn.Module:
    """Builds a model that has no pretrained weights."""
    with _located("model: ", section.origin, origin=origin, arguments=section.arguments):
        if isinstance(target, type) and is_transformers_class(target):
            return build_transformers(target, thaw(section.arguments))[0]
        if isinstance(target, type) and issubclass(target, Model) and "preset" in section.arguments:
            arguments = thaw(section.arguments)
            with _located("model: ", origin("model.preset")):
                arguments = preset_settings(target, arguments.pop("preset"), **arguments)
            registry.check_arguments(target, arguments, label="model")
            return target(**arguments)
        return _instantiate(section, project_dir, origin)


def _find(section: ModelSection, project_dir: Path) -> tuple[ModelSection, Any]:
    """Returns the class, and the section without a preset that was taken back by null."""
    target = registry.find("model", section.type, project_dir=project_dir, where=section.origin, label="model")
    if isinstance(target, type) and issubclass(target, Model) and section.get("preset", "") is None:
        kept = ModelSection.from_mapping({key: value for key, value in section.items() if key != "preset"})
        section = kept.located_at(section.origin)  # type: ignore[assignment]  # the same class
    return section, target


def _build_pretrained(
    section: ModelSection,
    target: Any,
    project_dir: Path,
    pretrained: _Pretrained,
    origin: registry.OriginOf,
    kept: PretrainedFacts | None,
) -> tuple[nn.Module, PretrainedFacts]:
    """Builds a model and loads its pretrained weights, or with `kept` gives it the sizes and dtypes that it had."""
    with (
        _located("model: ", section.origin, origin=origin, arguments=section.arguments),
        _located("model.pretrained: ", pretrained.where, CheckpointError),
    ):
        first, kept = kept, kept if pretrained.reader is None else None
        folder = None if kept is not None else _find_folder(pretrained)
        config = None if kept is None else kept.config
        if isinstance(target, type) and is_transformers_class(target):
            model, report = _build_theirs(target, thaw(section.arguments), pretrained, folder, config)
        elif isinstance(target, type) and issubclass(target, Model):
            if "preset" in section.arguments:
                problem = "preset and pretrained both say how large the model is. Keep one of the two."
                raise ConfigError(f"model: {problem}", where=origin("model.preset"))
            model, report = _build_ours(target, section, pretrained, folder, config)
        else:
            model, report = _instantiate(section, project_dir, origin), LoadReport((), ())
            if folder is not None:
                report = load_weights(model, folder, **pretrained.options)
        if kept is not None:
            give_dtypes(model, kept, dtype=pretrained.dtype)
            give_generation(model, kept)
            return model, kept
        assert folder is not None
        config = read_config_file(folder) if (folder / CONFIG_FILE).is_file() else None
        facts = gather_facts(config, report, model, dtype=pretrained.dtype)
        facts = replace(facts, generation=read_generation(model, folder))
        if first is not None and (facts.config, facts.report) != (first.config, first.report):
            raise CheckpointError(
                f"model.pretrained: {folder} is not what the run began with, and {pretrained.reader} makes something "
                "from its weights. Put the former folder back, or start over with --fresh.",
                where=pretrained.where,
            )
        return model, facts


def _build_theirs(
    target: type[Any],
    arguments: dict[str, Any],
    pretrained: _Pretrained,
    folder: Path | None,
    config: Mapping[str, Any] | None,
) -> tuple[nn.Module, LoadReport]:
    if pretrained.allow_pickle:
        raise ConfigError("pretrained.allow_pickle has no effect on models of transformers. Remove it.")
    for name in DTYPE_NAMES:
        if name in arguments and pretrained.has_dtype:
            raise ConfigError(f"{name} and pretrained.dtype are the same setting. Give one of them.")
    if pretrained.has_dtype:
        arguments["dtype"] = pretrained.dtype
    return build_transformers(target, arguments, pretrained=folder, strict=pretrained.strict, told=config)


def _build_ours(
    target: type[Model],
    section: ModelSection,
    pretrained: _Pretrained,
    folder: Path | None,
    config: Mapping[str, Any] | None,
) -> tuple[nn.Module, LoadReport]:
    """The files say the sizes; what stands in the section changes them."""
    arguments = thaw(section.arguments)
    # What the constructor needs, the files say.
    registry.check_arguments(target, arguments, label="model", provided=_needed(target))
    if folder is not None:
        return target.load_pretrained(folder, **pretrained.options, **arguments)
    assert config is not None
    return target.from_config(config, **arguments), LoadReport((), ())


def _instantiate(section: Component, project_dir: Path, origin: registry.OriginOf) -> nn.Module:
    model = registry.instantiate("model", section, project_dir=project_dir, label="model", origin_of=origin)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{section.type} gives a {type(model).__name__}, not a torch.nn.Module.")
    return model


@dataclass(frozen=True)
class _Pretrained:
    """The setting `model.pretrained`, checked."""

    folder: str | Path
    home_path: str | Path | None = None
    strict: bool | None = None
    """None where nobody says: true, but classes of transformers then draw a head that another class's files lack."""
    dtype: torch.dtype = torch.float32
    """Not the files' own unless that is asked for: weights of 16 bits would lose the small updates of a training."""
    has_dtype: bool = False
    """Was one asked for?"""
    allow_pickle: bool = False
    where: object | None = None
    reader: str | None = None
    """What makes something from the loaded weights, in a run that could do without them; None where nothing does."""

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `load_weights` and `load_pretrained`."""
        return {"strict": self.strict is not False, "dtype": self.dtype, "allow_pickle": self.allow_pickle}


def _find_folder(pretrained: _Pretrained) -> Path:
    try:
        return find_folder(pretrained.folder, home_path=pretrained.home_path)
    except CheckpointError as error:
        if pretrained.reader is None:
            needed = "for the run has no checkpoint and pretrained.json that could stand for it"
        else:
            needed = f"also beside a checkpoint, for {pretrained.reader} gets the loaded weights when it is made"
        raise CheckpointError(
            f"model.pretrained: {error.problem} It is needed, {needed}.", where=pretrained.where
        ) from error


def _read_pretrained(given: Any, project_dir: Path, origin: registry.OriginOf) -> _Pretrained | None:
    """Reads `pretrained: folder` or `{folder: …, strict: false}`; a folder beside the run file is found there."""
    if given is None:
        return None
    settings: Any = {"folder": given} if isinstance(given, (str, Path)) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("folder") or None, (str, Path)):
        raise ConfigError(
            f"model.pretrained: give a folder, or {{folder: …, strict: false}}; got {describe(given)}.",
            where=origin("model.pretrained"),
        )
    settings = {key: value for key, value in settings.items() if value is not None}

    def reject(key: str, problem: str) -> NoReturn:
        raise ConfigError(f"model.pretrained.{key}: {problem}", where=origin(f"model.pretrained.{key}"))

    for key, value in settings.items():
        if key not in PRETRAINED_KEYS:
            reject(key, f"is unknown. Known: {', '.join(PRETRAINED_KEYS)}.")
        if key in ("strict", "allow_pickle") and not isinstance(value, bool):
            reject(key, f"must be true or false, got {value!r}.")
        if key == "home_path" and not isinstance(value, (str, Path)):
            reject(key, f"must be a folder, got {value!r}.")
    dtype = None
    if "dtype" in settings:
        try:
            dtype = as_dtype(settings["dtype"])
        except ConfigError as error:
            reject("dtype", error.problem)
    folder = project_dir / Path(settings["folder"]).expanduser()
    return _Pretrained(
        folder=folder if folder.is_dir() else settings["folder"],
        home_path=settings.get("home_path"),
        strict=settings.get("strict"),
        dtype=dtype or torch.float32,
        has_dtype=dtype is not None,
        allow_pickle=settings.get("allow_pickle", False),
        where=origin("model.pretrained"),
    )


def _read_dtype(given: Any, pretrained: _Pretrained | None, origin: registry.OriginOf) -> torch.dtype | None:
    """Reads `dtype: bf16`, the type of a model's weights; buffers keep theirs."""
    if given is None:
        return None
    if pretrained is not None and pretrained.has_dtype:
        problem = "dtype and pretrained.dtype are the same setting. Give one of them."
        raise ConfigError(f"model: {problem}", where=origin("model.dtype"))
    try:
        return as_dtype(given)
    except ConfigError as error:
        raise ConfigError(f"model.dtype: {error.problem}", where=origin("model.dtype")) from error


def _takes_dtype(target: Any) -> bool:
    """Has the class a say of its own in the type of its weights? Those of transformers have."""
    if isinstance(target, type) and is_transformers_class(target):
        return True
    return "dtype" in (parameters_of(target) or ())


def _with_dtype(section: ModelSection, dtype: torch.dtype) -> Component:
    given = Component(section.type, **section.arguments, dtype=str(dtype).removeprefix("torch."))
    return given.located_at(section.origin)


def _rules(given: Any, origin: registry.OriginOf) -> dict[str, Component]:
    where = origin("model.replace")
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            'model.replace: must be a mapping such as {"layers.*.mlp": {type: my.py:MyMLP}}; '
            f"got {describe(given)}.",
            where=where,
        )
    rules = {}
    for glob, rule in given.items():
        if isinstance(rule, str):
            rules[glob] = Component(rule)
        elif isinstance(rule, Mapping) and isinstance(rule.get("type"), str):
            rules[glob] = Component.from_mapping(rule)
        else:
            raise ConfigError(
                f'model.replace."{glob}": must be a component with a type; got {describe(rule)}.', where=where
            )
        rules[glob] = rules[glob].located_at(where)
    return rules


def _maker(project_dir: Path) -> Callable[[Component, nn.Module], nn.Module]:
    def make(component: Component, old: nn.Module) -> nn.Module:
        label = "model.replace"
        provided = {"replaces": old} if _asks_for_replaced(component, project_dir) else {}
        made: nn.Module = registry.instantiate("model", component, project_dir=project_dir, label=label, **provided)
        return made

    return make


def _asks_for_replaced(component: Component, project_dir: Path) -> bool:
    """Does a replacement get the module that it replaces?

    Only where the signature names it: a constructor that takes any keyword may pass it on to another.
    """
    where, label = component.origin, "model.replace"
    target = registry.find("model", component.type, project_dir=project_dir, where=where, label=label)
    return "replaces" in (parameters_of(target) or ())


def _lora_settings(given: Any, origin: registry.OriginOf) -> dict[str, Any]:
    where = origin("model.lora")
    settings: dict[str, Any] = thaw(given) if isinstance(given, Mapping) else {}
    known = [name for name in inspect.signature(add_lora).parameters if name != "model"]
    for key in settings:
        if key not in known:
            problem = f"model.lora.{key}: is unknown. {suggest(key, known, cutoff=0.4)}"
            raise ConfigError(problem, where=origin(f"model.lora.{key}"))
    if "match" not in settings:
        raise ConfigError(
            f'model.lora: must be a mapping such as {{match: "*.q_proj", rank: 8}}; got {describe(given)}.', where=where
        )
    return settings


@contextmanager
def _located(
    start: str,
    where: object | None,
    kind: type[TrainwrightError] = ConfigError,
    *,
    origin: registry.OriginOf | None = None,
    arguments: Collection[str] = (),
) -> Iterator[None]:
    """Says of errors of a kind inside to which part of the section they belong, and where that was written.

    With `origin` that is the place of the very setting that an error begins with (`lora.rank: …`), or of one of the
    `arguments` that it names: an override may have changed that one alone.
    """
    try:
        yield
    except kind as error:
        place = where if origin is None else _place_named(error.problem, where, origin, arguments)
        if error.where is not None and error.where == where != place:
            raise type(error)(error.problem, where=place) from error.__cause__
        if error.where is not None or (place is None and error.problem.startswith(start)):
            raise
        raise type(error)(start + error.problem.removeprefix(start), where=place) from error


def _place_named(
    problem: str, where: object | None, origin: registry.OriginOf, arguments: Collection[str]
) -> object | None:
    """Returns where the setting was written that an error names; of several the one that is not where all are."""
    named = [name for name in re.findall(r"\w+", problem) if name in arguments]
    labels = [f"model.{problem.partition(':')[0].removeprefix('model.')}", *(f"model.{name}" for name in named)]
    if CONFIG_FILE in problem:
        labels.append("model.pretrained")
    places = [found for label in labels if " " not in label and (found := origin(label)) is not None]
    return next((found for found in places if found != where), where)


class _Generators:
    """The states of the global generators at one moment: torch's (on the CPU), Python's and numpy's."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def restore(self) -> None:
        """Puts the states back."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _needed(target: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters without a default."""
    every = inspect.signature(target).parameters.values()
    return tuple(one.name for one in every if one.default is one.empty)
