"""Builds a model from the `model` section: build, load pretrained weights, replace, adapt, quantize, freeze."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_args

import numpy as np
import torch
from torch import nn

from trainwright.config import Component, ModelSection
from trainwright.config.frozen import thaw
from trainwright.config.problems import describe, suggest
from trainwright.errors import CheckpointError, ComponentError, ConfigError, TrainwrightError
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, preset_settings
from trainwright.models.names import as_globs, matched_parameters, names_module, unmatched
from trainwright.models.peft_adapters import add_peft, read_peft_settings, renamed_by_peft
from trainwright.models.pretrained import (
    CONFIG_FILE,
    DrawNarrow,
    LoadReport,
    as_dtype,
    find_folder,
    load_weights,
    on_meta,
)
from trainwright.models.pretrained_facts import PretrainedFacts, gather_facts, restore_facts
from trainwright.models.quantize import quantize_model, reject_unfrozen
from trainwright.models.transformers_kernels import Kernels
from trainwright.models.transformers_models import DTYPE_NAMES, build_transformers, is_transformers_class
from trainwright.registry import resolve as registry
from trainwright.user_code.locations import parameters_of


class FreezeRule(NamedTuple):
    """An entry of `model.freeze`: globs of parameter names, and when they become trainable; never if there is no
    limit."""

    globs: tuple[str, ...]
    until_step: int | None = None
    until_epoch: int | None = None

    def has_ended(self, *, step: int, epoch: int) -> bool:
        """Returns True after `step` completed updates, before an update of `epoch`."""
        by_step = self.until_step is not None and step >= self.until_step
        return by_step or (self.until_epoch is not None and epoch >= self.until_epoch)


def read_freeze(given: Any) -> list[FreezeRule]:
    """Reads `model.freeze`: a glob, a mapping with `match` and until_step or until_epoch, or a list of either."""
    entries = given if isinstance(given, list | tuple) else [given]
    rules = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            rules.append(FreezeRule(as_globs("freeze", entry)))
            continue
        limits = {key: value for key, value in entry.items() if key != "match"}
        wrong = [key for key in limits if key not in ("until_step", "until_epoch")]
        if wrong:
            raise ConfigError(f"freeze: {wrong[0]}: {suggest(wrong[0], ('match', 'until_step', 'until_epoch'))}")
        if "match" not in entry or len(limits) != 1:
            raise ConfigError(
                'freeze: needs match and one of until_step and until_epoch, such as {match: "body.*", until_epoch: 3}; '
                f"got {describe(entry)}."
            )
        for key, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"freeze: {key} must be a whole number of at least 1; got {value!r}.")
        rules.append(FreezeRule(as_globs("freeze", entry["match"]), **limits))
    return rules


def freeze(model: nn.Module, given: Any) -> list[str]:
    """Freezes every parameter whose name a rule of `model.freeze` matches; returns the names.

    A glob that matches no parameter is rejected. A tied parameter is frozen by either of its names.
    """
    names = [name for rule in read_freeze(given) for name in matched_parameters("freeze", rule.globs, model)]
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in names:
        own[name].requires_grad_(False)
    return names


def disable_untrainable_params(model: nn.Module, globs: Any = ()) -> list[str]:
    """Freezes what the globs match and what the model's own `disable_untrainable_params()` freezes, if it has one.

    Returns the names of the parameters that this froze, in the model's order. Call it before creating an optimizer.
    """
    before = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = getattr(model, "disable_untrainable_params", None)
    if callable(own):
        own()
    freeze(model, globs)
    return [name for name, parameter in model.named_parameters() if name in before and not parameter.requires_grad]


Make = Callable[[Any, nn.Module], nn.Module]
"""Creates the module of a rule; the second argument is the module that it replaces."""


def replace_modules(model: nn.Module, rules: Mapping[str, Any], make: Make) -> list[str]:
    """Replaces each sub-module that a rule's glob matches by `make(component, old)`; returns their names.

    If a glob matches a module and another one inside of it, the outer one is replaced. Two rules that match one module,
    or one inside of the other, are rejected, as is a rule that matches nothing; the model is then unchanged. The order
    of the rules has no effect: modules are created in the model's order. A module that the model has twice is replaced
    by one. The new modules have the training or evaluation mode of the old ones; nothing else is copied, so a weight
    that was tied to the old one is no longer tied.
    """
    owners = claimed_modules(model, rules)
    created: dict[int, nn.Module] = {}
    claimed_by: dict[int, str] = {}
    old_modules = {name: model.get_submodule(name) for name in owners}
    for name, glob in owners.items():
        old = old_modules[name]
        if claimed_by.setdefault(id(old), glob) != glob:
            raise ConfigError(
                f'replace: "{claimed_by[id(old)]}" and "{glob}" match one module that the model has twice, once as '
                f"{name}. Let one rule match both."
            )
        if id(old) not in created:
            new = make(rules[glob], old)
            if not isinstance(new, nn.Module):
                kind = type(new).__name__
                raise ConfigError(f'replace: "{glob}" returned a {kind}, not a torch.nn.Module, for {name}.')
            created[id(old)] = new.train(old.training)
    # Only after all are created, so that a failing constructor leaves the model unchanged.
    for name, old in old_modules.items():
        model.set_submodule(name, created[id(old)])
    return list(owners)


def claimed_modules(model: nn.Module, rules: Mapping[str, Any]) -> dict[str, str]:
    """Returns the modules that the rules replace, in the model's order, each with the rule's glob."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    owners: dict[str, str] = {}
    for glob in rules:
        matched = {name for name in names if names_module(glob, name)}
        if not matched:
            raise ConfigError(f"replace: {unmatched(glob, names, 'module')}")
        for name in sorted(matched):
            if any(outer in matched for outer in _outer_modules(name)):
                continue
            if name in owners:
                raise ConfigError(f'replace: "{owners[name]}" and "{glob}" both match {name}. Make one narrower.')
            owners[name] = glob
    for name, glob in owners.items():
        for outer in _outer_modules(name):
            if outer in owners:
                raise ConfigError(
                    f'replace: "{glob}" matches {name}, which is inside of {outer}, which "{owners[outer]}" matches. '
                    "Remove one of them."
                )
    return {name: owners[name] for name in names if name in owners}


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
    """Builds the model of a `model` section, on the CPU, in training mode.

    Also returns the facts of its pretrained folder; None without one. With `kept`, the facts of an earlier start, the
    folder is not needed and no weights are loaded, because a checkpoint has them. The folder is loaded again if
    `reader`, user code that receives the model next, or a replacement with the parameter `replaces` may compute a value
    from the loaded weights that no checkpoint has. Randomly initialized parameters (of a head that the pretrained files
    lack, or of a replacement) are trained even with adapters, which freeze all others.
    """
    reserved, origin = section.reserved, _origin_in_args(section, origin)
    pretrained = _read_pretrained(reserved.get("pretrained"), project_dir, origin)
    rules = _rules(reserved["replace"], origin) if "replace" in reserved else {}
    restore_generators = _save_generators()
    section, target = _find(section, project_dir)
    kernels = _read_kernels(section, target, origin)
    component: Component = section
    dtype = _read_dtype(reserved.get("dtype"), pretrained, origin)
    if dtype is not None and pretrained is not None:
        pretrained, dtype = replace(pretrained, dtype=dtype, has_dtype=True), None
    elif dtype is not None and (is_transformers_class(target) or "dtype" in (parameters_of(target) or ())):
        component, dtype = _with_args(section, dtype=str(dtype).removeprefix("torch.")), None
    readers = [rule.type for rule in rules.values() if _asks_for_replaced(rule, project_dir)]
    # A user's file may draw random numbers when it is imported, which happens only once per process.
    restore_generators()
    if pretrained is None:
        is_narrow = dtype in (torch.bfloat16, torch.float16) and _draws_plainly(target)
        with DrawNarrow(dtype) if is_narrow and dtype is not None else nullcontext():
            model, facts = _build(component, target, project_dir, origin, kernels=kernels), None
        if dtype is not None:
            for parameter in model.parameters():  # buffers, such as tables of angles, keep their dtype
                parameter.data = parameter.data.to(dtype)
    else:
        if kept is not None:
            pretrained = replace(pretrained, reader=reader or next(iter(readers), None))
        model, facts = _build_pretrained(section, target, project_dir, pretrained, origin, kept, kernels=kernels)
        # Loading draws fewer random numbers than building. Later steps may keep random values that no checkpoint has (a
        # computed buffer of a replacement), so they must draw the same numbers at every start.
        restore_generators()
    drawn = [] if facts is None else list(facts.report.missing)
    if rules:

        def make(rule: Component, old: nn.Module) -> nn.Module:
            options: dict[str, Any] = {"replaces": old} if _asks_for_replaced(rule, project_dir) else {}
            options |= {"project_dir": project_dir, "label": "model.replace", "base": nn.Module}
            module: nn.Module = registry.instantiate("model", rule, **options)
            return module

        with _located("model.", origin("model.replace")):
            replaced = replace_modules(model, rules, make)
        inside = tuple(f"{one}." for one in replaced)
        drawn += [name for name, _ in model.named_parameters() if name.startswith(inside)]
        if facts is not None:
            facts = replace(facts, loaded=frozenset(name for name in facts.loaded if not name.startswith(inside)))
    if reserved.get("peft") is not None:
        if reserved.get("lora") is not None:
            problem = "peft and lora both add adapters. Keep one of them."
            raise ConfigError(f"model: {problem}", where=origin("model.peft"))
        adapter = read_peft_settings(thaw(reserved["peft"]), origin=origin)
        before = {id(each): name for name, each in model.named_parameters(remove_duplicate=False)}
        with _located("model.", origin("model.peft")):
            model = add_peft(model, adapter, drawn=drawn)
        if facts is not None:
            facts = replace(facts, loaded=renamed_by_peft(model, before, facts.loaded))
    if "lora" in reserved:
        settings = _lora_settings(reserved["lora"], origin)
        with _located("model.", origin("model.lora"), origin=origin):
            add_lora(model, **settings)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            parameter.requires_grad_(parameter.requires_grad or name in drawn)
    if reserved.get("quantize") is not None:
        with _located("model.", origin("model.quantize"), origin=origin):
            renamed = quantize_model(model, thaw(reserved["quantize"]))
        if facts is not None:
            codes = {code for name in facts.loaded & renamed.keys() for code in renamed[name]}
            facts = replace(facts, loaded=(facts.loaded - renamed.keys()) | codes)
    with _located("model.", origin("model.freeze")):
        for rule in read_freeze(reserved.get("freeze", ())):
            if rule.until_step is not None or rule.until_epoch is not None:
                reject_unfrozen(model, matched_parameters("freeze", rule.globs, model))
        disable_untrainable_params(model, reserved.get("freeze", ()))
    return model, facts


def pretrained_source(section: ModelSection, *, project_dir: Path) -> str:
    """Returns the folder or name in `model.pretrained`, for messages."""
    given = section.reserved["pretrained"]
    name = given["folder"] if isinstance(given, Mapping) else given
    folder = project_dir / Path(name).expanduser()
    return str(folder if folder.is_dir() else name)


def pretrained_folder(section: ModelSection, *, project_dir: Path) -> Path | None:
    """Returns the folder of `model.pretrained`; None without the setting, or if it cannot be found."""
    given = section.reserved.get("pretrained")
    if given is None:
        return None
    home = given.get("home_path") if isinstance(given, Mapping) else None
    try:
        return find_folder(pretrained_source(section, project_dir=project_dir), home_path=home)
    except CheckpointError:
        return None


def is_as_shipped(section: ModelSection, *, project_dir: Path) -> bool:
    """Returns True if this section builds a shipped class without user code, which can be on the meta device.

    A user's class, a replacement or peft may compute from weights, or draw other random numbers; `lora` does not.
    """
    restore_generators = _save_generators()
    _, target = _find(section, project_dir)
    restore_generators()  # a file may draw random numbers when it is imported
    is_changed = "replace" in section.reserved or "peft" in section.reserved
    return _is_shipped_kind(target) and target.is_shipped() and not is_changed


def build_without_memory(
    section: ModelSection, *, project_dir: Path, origin: registry.OriginOf, kept: PretrainedFacts | None
) -> nn.Module:
    """Builds the model of a section without user code on the meta device: names, sizes and dtypes, without values.

    `kept` are the facts of the pretrained folder, from the rank that has the values; None without a folder.
    """
    with on_meta():
        return build_model_section(section, project_dir=project_dir, origin=origin, kept=kept)[0]


def _read_kernels(section: ModelSection, target: Any, origin: registry.OriginOf) -> Kernels:
    """Returns `model.kernels`, which only applies to classes of transformers."""
    given = section.reserved.get("kernels", "fast")
    if given not in get_args(Kernels):
        problem = f"must be one of {', '.join(get_args(Kernels))}; got {given!r}."
        raise ConfigError(f"model.kernels: {problem}", where=origin("model.kernels"))
    if "kernels" in section.reserved and not is_transformers_class(target):
        problem = f"has no effect on {section.type}, which is not a class of transformers. Remove it."
        raise ConfigError(f"model.kernels: {problem}", where=origin("model.kernels"))
    kernels: Kernels = given
    return kernels


def _build(
    section: Component, target: Any, project_dir: Path, origin: registry.OriginOf, *, kernels: Kernels
) -> nn.Module:
    """Builds a model that has no pretrained weights."""
    with _located("model: ", section.origin, origin=origin, arguments=section.arguments):
        arguments = thaw(section.arguments)
        if is_transformers_class(target):
            return build_transformers(target, arguments, kernels=kernels)[0]
        if _is_shipped_kind(target) and "preset" in arguments:
            with _located("model: ", origin("model.preset")):
                arguments = preset_settings(target, arguments.pop("preset"), **arguments)
            registry.check_arguments(target, arguments, label="model")
            model: nn.Module = target(**arguments)
            return model
        return _instantiate(section, project_dir, origin)


def _find(section: ModelSection, project_dir: Path) -> tuple[ModelSection, Any]:
    """Returns the class, and the section without a preset of null."""
    target: Any = registry.find("model", section.type, project_dir=project_dir, where=section.origin, label="model")
    # A class with its own __new__ may create an object of another class.
    is_class = isinstance(target, type) and getattr(target, "__new__", None) is object.__new__
    if is_class and not (issubclass(target, nn.Module) or is_transformers_class(target)):
        raise ComponentError(f"model.type: {section.type} is not a subclass of nn.Module.", where=section.origin)
    if _is_shipped_kind(target) and section.get("preset", "") is None:
        kept = ModelSection.from_mapping({key: value for key, value in section.items() if key != "preset"})
        section = kept.located_at(section.origin)  # type: ignore[assignment]  # the same class
    own = (parameters_of(target) or {}).get("args")
    if "args" in section and own is not None and own.kind is not own.VAR_POSITIONAL:
        # A constructor such as Net(args) receives the mapping itself.
        bare = ModelSection.from_mapping({key: value for key, value in section.items() if key != "args"})
        section = _with_args(bare.located_at(section.origin), args=section["args"])
    return section, target


def _origin_in_args(section: ModelSection, origin: registry.OriginOf) -> registry.OriginOf:
    """Returns a function that also finds the arguments in `model.args`."""

    def origin_of(setting: str) -> Any:
        first = setting.removeprefix("model.").partition(".")[0]
        is_in_args = first not in section and first in section.verbatim
        return origin(setting.replace("model.", "model.args.", 1) if is_in_args else setting)

    return origin_of


def _with_args(section: Component, **arguments: Any) -> ModelSection:
    """Returns the section with further arguments, even if their names are reserved."""
    values = {**section, "args": {**section.get("args", {}), **arguments}}
    return ModelSection.from_mapping(values).located_at(section.origin)  # type: ignore[return-value]  # the same class


def _build_pretrained(
    section: ModelSection,
    target: Any,
    project_dir: Path,
    pretrained: _Pretrained,
    origin: registry.OriginOf,
    kept: PretrainedFacts | None,
    *,
    kernels: Kernels,
) -> tuple[nn.Module, PretrainedFacts]:
    """Builds a model and loads its pretrained weights, or with `kept` restores its sizes and dtypes."""
    with (
        _located("model: ", section.origin, origin=origin, arguments=section.arguments),
        _located("model.pretrained: ", pretrained.where, CheckpointError),
    ):
        first, kept = kept, kept if pretrained.reader is None else None
        folder = None if kept is not None else _find_folder(pretrained)
        if _is_shipped_kind(target) and "preset" in section.arguments:
            problem = "preset and pretrained both set the size of the model. Keep one of them."
            raise ConfigError(f"model: {problem}", where=origin("model.preset"))
        if is_transformers_class(target) or _is_shipped_kind(target):
            config = None if kept is None else kept.config
            model, report = _build_from_folder(
                target, thaw(section.arguments), pretrained, folder, config, kernels=kernels
            )
        else:
            model, report = _instantiate(section, project_dir, origin), LoadReport((), ())
            if folder is not None:
                report = load_weights(model, folder, **pretrained.options)
        if kept is not None:
            restore_facts(model, kept, dtype=pretrained.dtype)
            return model, kept
        assert folder is not None
        facts = gather_facts(folder, report, model, dtype=pretrained.dtype)
        own = model.state_dict(keep_vars=True)
        drawn = {id(own[name]) for name in report.missing if name in own}
        every = model.named_parameters(remove_duplicate=False)
        facts = replace(facts, loaded=frozenset(name for name, each in every if id(each) not in drawn))
        if first is not None and (facts.config, facts.report) != (first.config, first.report):
            raise CheckpointError(
                f"model.pretrained: {folder} is not what the run began with, and {pretrained.reader} reads its "
                "weights. Restore the former folder, or start over with --fresh.",
                where=pretrained.where,
            )
        return model, facts


def _build_from_folder(
    target: Any,
    arguments: dict[str, Any],
    pretrained: _Pretrained,
    folder: Path | None,
    config: Mapping[str, Any] | None,
    *,
    kernels: Kernels,
) -> tuple[nn.Module, LoadReport]:
    """Builds a class that reads Hugging Face's folders: the sizes come from the files, and `arguments` override
    them."""
    if is_transformers_class(target):
        if pretrained.allow_pickle:
            raise ConfigError("pretrained.allow_pickle has no effect on models of transformers. Remove it.")
        for name in DTYPE_NAMES:
            if name in arguments and pretrained.has_dtype:
                raise ConfigError(f"{name} and pretrained.dtype are the same setting. Keep one of them.")
        if pretrained.has_dtype:
            arguments["dtype"] = pretrained.dtype
        options: dict[str, Any] = {"strict": pretrained.strict, "told": config, "kernels": kernels}
        return build_transformers(target, arguments, pretrained=folder, **options)
    every = inspect.signature(target).parameters.values()
    required = tuple(one.name for one in every if one.default is one.empty)
    registry.check_arguments(target, arguments, label="model", provided=required)
    if folder is not None:
        loaded: tuple[nn.Module, LoadReport] = target.load_pretrained(folder, **pretrained.options, **arguments)
        return loaded
    assert config is not None
    return target.from_config(config, **arguments), LoadReport((), ())


def _draws_plainly(target: Any) -> bool:
    """Returns True for a shipped class whose weights can be drawn in 16 bits."""
    return _is_shipped_kind(target) and target.is_shipped() and target.draws_plainly


def _is_shipped_kind(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, Model)


def _instantiate(section: Component, project_dir: Path, origin: registry.OriginOf) -> nn.Module:
    model = registry.instantiate("model", section, project_dir=project_dir, label="model", origin_of=origin)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{section.type} returned a {type(model).__name__}, not a torch.nn.Module.")
    return model


@dataclass(frozen=True)
class _Pretrained:
    """The setting `model.pretrained`, checked."""

    folder: str | Path
    home_path: str | Path | None = None
    strict: bool | None = None
    """None means true, except that classes of transformers initialize a head that another class's files lack."""
    dtype: torch.dtype = torch.float32
    """Not the files' dtype by default, because 16-bit weights lose small updates."""
    has_dtype: bool = False
    """True if the config sets it."""
    allow_pickle: bool = False
    where: object | None = None
    reader: str | None = None
    """The code that reads the loaded weights in a resumed run; None if there is none."""

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `load_weights` and `load_pretrained`."""
        return {"strict": self.strict is not False, "dtype": self.dtype, "allow_pickle": self.allow_pickle}


def _find_folder(pretrained: _Pretrained) -> Path:
    try:
        return find_folder(pretrained.folder, home_path=pretrained.home_path)
    except CheckpointError as error:
        if pretrained.reader is None:
            needed = "because the run has no checkpoint with a pretrained.json"
        else:
            needed = f"also with a checkpoint, because {pretrained.reader} reads the loaded weights"
        problem = f"model.pretrained: {error.problem} It is needed, {needed}."
        raise CheckpointError(problem, where=pretrained.where) from error


def _read_pretrained(given: Any, project_dir: Path, origin: registry.OriginOf) -> _Pretrained | None:
    """Reads `pretrained: folder` or `{folder: …, strict: false}`; a folder may be relative to the run file."""
    if given is None:
        return None
    settings: Any = {"folder": given} if isinstance(given, (str, Path)) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("folder") or None, (str, Path)):
        raise ConfigError(
            f"model.pretrained: must be a folder, or {{folder: …, strict: false}}; got {describe(given)}.",
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
    if "dtype" in settings:
        try:
            settings |= {"dtype": as_dtype(settings["dtype"]), "has_dtype": True}
        except ConfigError as error:
            reject("dtype", error.problem)
    folder = project_dir / Path(settings["folder"]).expanduser()
    if folder.is_dir():
        settings["folder"] = folder
    return _Pretrained(**settings, where=origin("model.pretrained"))


def _read_dtype(given: Any, pretrained: _Pretrained | None, origin: registry.OriginOf) -> torch.dtype | None:
    """Reads `dtype: bf16`, the dtype of a model's weights; buffers keep their dtype."""
    if given is None:
        return None
    if pretrained is not None and pretrained.has_dtype:
        problem = "dtype and pretrained.dtype are the same setting. Keep one of them."
        raise ConfigError(f"model: {problem}", where=origin("model.dtype"))
    try:
        return as_dtype(given)
    except ConfigError as error:
        raise ConfigError(f"model.dtype: {error.problem}", where=origin("model.dtype")) from error


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


def _asks_for_replaced(component: Component, project_dir: Path) -> bool:
    """Returns True if a replacement has the parameter `replaces`, and therefore receives the module that it replaces.

    `**kwargs` parameters do not count, because they may be passed to another constructor.
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
    """Adds the setting and its source location to errors of a kind.

    With `origin`, it is the location of the setting that an error begins with (`lora.rank: …`), or of one of the
    `arguments` that it names, which an override may have set separately.
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
    """Returns the source location of the setting that an error names; of several, one that is not at `where`."""
    named = [name for name in re.findall(r"\w+", problem) if name in arguments]
    labels = [f"model.{problem.partition(':')[0].removeprefix('model.')}", *(f"model.{name}" for name in named)]
    if CONFIG_FILE in problem:
        labels.append("model.pretrained")
    places = [found for label in labels if " " not in label and (found := origin(label)) is not None]
    return next((found for found in places if found != where), where)


def _save_generators() -> Callable[[], None]:
    """Returns a function that restores the current states of torch's CPU, Python's and numpy's generators."""
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)

    return restore
