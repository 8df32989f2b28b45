"""From the `model` section to a model: build, load pretrained weights, replace, adapt, freeze, in this order.

Weights are loaded first, into the model as it was published; replacements then take the place of what was loaded, and
adapters go on the layers that there are at last. Freezing comes last: what the user names is frozen, whatever else.
Each step is a file of its own; who asks for a model, and when, is parts.py's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright import registry
from trainwright.config import Component, ModelSection
from trainwright.errors import ConfigError
from trainwright.models.freeze import freeze
from trainwright.models.locate import find_folder
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, preset_settings
from trainwright.models.pretrained import LoadReport, as_dtype, load_weights, read_config_file
from trainwright.models.replace import replace_modules
from trainwright.models.transformers_models import build_transformers, is_transformers_class

Origin = Callable[[str], object | None]
"""Where a setting such as `model.lora` was written, or None."""

PRETRAINED_KEYS = ("folder", "strict", "home_path", "dtype", "allow_pickle")
NOT_SUPPORTED = ("sharding", "remat", "scan", "offload")


def build_model_section(
    section: ModelSection, *, project_dir: Path, origin: Origin, loads_weights: bool = True
) -> nn.Module:
    """Builds the model that a `model` section describes, on the CPU, in training mode.

    Without `loads_weights` it is only built: others follow, from a checkpoint. The pretrained folder still says the
    sizes, where it is there.
    What was drawn at random (a head that the pretrained files lack, what a replacement brought) is trained also
    beside adapters, which freeze the rest: frozen, it would stay noise.
    """
    reserved = section.reserved
    for key in NOT_SUPPORTED:
        if key in reserved:
            raise ConfigError(f"model.{key} is not supported in this version. Remove it.", where=origin(f"model.{key}"))
    model, report = _build(section, project_dir, origin, loads_weights=loads_weights)
    drawn = list(report.missing)
    if "replace" in reserved:
        rules = _rules(reserved["replace"], origin)
        with _located("model.", origin("model.replace")):
            replaced = replace_modules(model, rules, _maker(project_dir))
        drawn += [name for name, _ in model.named_parameters() if name.startswith(tuple(f"{one}." for one in replaced))]
    if "lora" in reserved:
        settings = _lora_settings(reserved["lora"], origin("model.lora"))
        with _located("model.", origin("model.lora")):
            add_lora(model, **settings)
        own = dict(model.named_parameters(remove_duplicate=False))
        for name in drawn:
            if name in own:
                own[name].requires_grad_(True)
    freeze_own: Callable[[], Any] | None = getattr(model, "disable_untrainable_params", None)
    if freeze_own is not None:
        freeze_own()  # a model that knows itself what is not to be trained
    if "freeze" in reserved:
        with _located("model.", origin("model.freeze")):
            freeze(model, reserved["freeze"])
    return model


def _build(
    section: ModelSection, project_dir: Path, origin: Origin, *, loads_weights: bool
) -> tuple[nn.Module, LoadReport]:
    where = section.origin
    target = registry.find("model", section.type, project_dir=project_dir, where=where, label="model")
    pretrained = _read_pretrained(section.reserved.get("pretrained"), project_dir, origin("model.pretrained"))
    with _located("model: ", where):
        if isinstance(target, type) and is_transformers_class(target):
            return _build_theirs(target, _plain(section.arguments), pretrained)
        if isinstance(target, type) and issubclass(target, Model) and (pretrained or "preset" in section.arguments):
            return _build_ours(target, section, pretrained, loads_weights=loads_weights)
        model = registry.instantiate("model", section, project_dir=project_dir, label="model")
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{section.type} gives a {type(model).__name__}, not a torch.nn.Module.")
        return model, _load(model, pretrained) if pretrained and loads_weights else LoadReport((), ())


def _build_theirs(
    target: type[Any], arguments: dict[str, Any], pretrained: dict[str, Any]
) -> tuple[nn.Module, LoadReport]:
    if pretrained.pop("allow_pickle", False):
        raise ConfigError("pretrained.allow_pickle has no effect on models of transformers. Remove it.")
    if "dtype" in pretrained:
        arguments["dtype"] = pretrained.pop("dtype")
    return build_transformers(target, arguments, pretrained=pretrained.pop("folder", None), **pretrained)


def _build_ours(
    target: type[Model], section: ModelSection, pretrained: dict[str, Any], *, loads_weights: bool
) -> tuple[nn.Module, LoadReport]:
    """A preset or the files say the sizes; what stands in the section changes them."""
    arguments = _plain(section.arguments)
    preset = arguments.pop("preset", None)
    if preset is not None:
        if pretrained:
            raise ConfigError("preset and pretrained both say how large the model is. Keep one of the two.")
        arguments = preset_settings(target, preset, **arguments)
        registry.check_arguments(target, arguments, label="model", where=section.origin)
        return target(**arguments), LoadReport((), ())
    known = _parameters(target)
    registry.check_arguments(target, arguments, label="model", where=section.origin, provided=known)
    if not loads_weights:
        return target.from_config(read_config_file(_folder_of(pretrained)), **arguments), LoadReport((), ())
    return target.load_pretrained(
        _folder_of(pretrained),
        strict=pretrained.get("strict", True),
        # Not the files' own: weights of 16 bits would lose the small updates of a training.
        dtype=as_dtype(pretrained.get("dtype")) or torch.float32,
        may_unpickle=pretrained.get("allow_pickle", False),
        **arguments,
    )


def _load(model: nn.Module, pretrained: Mapping[str, Any]) -> LoadReport:
    return load_weights(
        model,
        _folder_of(pretrained),
        strict=pretrained.get("strict", True),
        # Not the files' own: weights of 16 bits would lose the small updates of a training.
        dtype=as_dtype(pretrained.get("dtype")) or torch.float32,
        may_unpickle=pretrained.get("allow_pickle", False),
    )


def _folder_of(pretrained: Mapping[str, Any]) -> Path:
    return find_folder(pretrained["folder"], home_path=pretrained.get("home_path"))


def _read_pretrained(given: Any, project_dir: Path, where: object | None) -> dict[str, Any]:
    """Reads `pretrained: folder` or `{folder: …, strict: false}`; a folder beside the run file is found there."""
    if given is None:
        return {}
    settings = {"folder": given} if isinstance(given, (str, Path)) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("folder"), (str, Path)):
        raise ConfigError(
            f"model.pretrained: give a folder, or {{folder: …, strict: false}}; got {given!r}.", where=where
        )
    for key in settings:
        if key not in PRETRAINED_KEYS:
            raise ConfigError(f"model.pretrained.{key}: is unknown. Known: {', '.join(PRETRAINED_KEYS)}.", where=where)
    beside = project_dir / Path(settings["folder"]).expanduser()
    return {**settings, **({"folder": beside} if beside.is_dir() else {})}


def _rules(given: Any, origin: Origin) -> dict[str, Component]:
    where = origin("model.replace")
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f'model.replace: must be a mapping such as {{"layers.*.mlp": {{type: my.py:MyMLP}}}}; got {given!r}.',
            where=where,
        )
    rules = {}
    for glob, rule in given.items():
        if isinstance(rule, str):
            rules[glob] = Component(rule)
        elif isinstance(rule, Mapping) and isinstance(rule.get("type"), str):
            rules[glob] = Component.from_mapping(rule)
        else:
            raise ConfigError(f'model.replace."{glob}": must be a component with a type; got {rule!r}.', where=where)
        rules[glob] = rules[glob].located_at(where)  # type: ignore[arg-type]  # the config's own origin
    return rules


def _maker(project_dir: Path) -> Callable[[Component, nn.Module], nn.Module]:
    def make(component: Component, old: nn.Module) -> nn.Module:
        where, label = component.origin, "model.replace"
        target = registry.find("model", component.type, project_dir=project_dir, where=where, label=label)
        # Only where the signature names it: a constructor that takes any keyword may pass it on to another.
        provided = {"replaces": old} if "replaces" in _parameters(target) else {}
        made: nn.Module = registry.instantiate("model", component, project_dir=project_dir, label=label, **provided)
        return made

    return make


def _lora_settings(given: Any, where: object | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'model.lora: must be a mapping such as {{match: "*.q_proj", rank: 8}}; got {given!r}.', where=where
        )
    settings: dict[str, Any] = _plain(given)
    registry.check_arguments(add_lora, settings, label="model.lora", where=where, provided=("model",))
    return settings


@contextmanager
def _located(start: str, where: object | None) -> Iterator[None]:
    """Says of errors inside to which part of the section they belong, and where that was written."""
    try:
        yield
    except ConfigError as error:
        if error.where is not None or (where is None and error.problem.startswith(start)):
            raise
        raise type(error)(start + error.problem.removeprefix(start), where=where) from error


def _parameters(target: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
