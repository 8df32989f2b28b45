"""From the `model` section to a model: build, load pretrained weights, replace, adapt, freeze, in this order.

Weights are loaded first, into the model as it was published; replacements then take the place of what was loaded, and
adapters go on the layers that there are at last. Freezing comes last: what the user names is frozen, whatever else.
A run that has a checkpoint loads no weights here, and its pretrained folder may be gone (pretrained_facts.py).
Each step is a file of its own; who asks for a model, and when, is parts.py's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from trainwright import registry
from trainwright.config import Component, ModelSection
from trainwright.config.problems import describe
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.models.empty import Generators
from trainwright.models.freeze import freeze
from trainwright.models.locate import find_folder
from trainwright.models.lora import add_lora
from trainwright.models.model import Model, preset_settings
from trainwright.models.pretrained import CONFIG_FILE, LoadReport, as_dtype, load_weights, read_config_file
from trainwright.models.pretrained_facts import PretrainedFacts, gather_facts, give_dtypes
from trainwright.models.replace import replace_modules
from trainwright.models.transformers_models import DTYPE_NAMES, build_transformers, is_transformers_class

Origin = Callable[[str], object | None]
"""Where a setting such as `model.lora` was written, or None."""

PRETRAINED_KEYS = ("folder", "strict", "home_path", "dtype", "allow_pickle")
NOT_SUPPORTED = ("sharding", "remat", "scan", "offload")


def build_model_section(
    section: ModelSection, *, project_dir: Path, origin: Origin, kept: PretrainedFacts | None = None
) -> tuple[nn.Module, PretrainedFacts | None]:
    """Builds the model that a `model` section describes, on the CPU, in training mode.

    Also returns what its pretrained folder told, None where it has none. With `kept`, which is what an earlier start
    got so, the folder is not looked for and no weights are loaded: others follow, from a checkpoint.
    What was drawn at random (a head that the pretrained files lack, what a replacement brought) is trained also
    beside adapters, which freeze the rest: frozen, it would stay noise.
    """
    reserved = section.reserved
    for key in NOT_SUPPORTED:
        if key in reserved:
            raise ConfigError(f"model.{key} is not supported in this version. Remove it.", where=origin(f"model.{key}"))
    pretrained = _read_pretrained(reserved.get("pretrained"), project_dir, origin)
    generators = Generators()
    if pretrained is None:
        model, facts = _build(section, project_dir, origin), None
    else:
        model, facts = _build_pretrained(section, project_dir, pretrained, origin, kept)
        # Loading draws less than building does. What follows may keep numbers that no checkpoint holds (a computed
        # buffer of a replacement), and draws the same ones at every start.
        generators.restore()
    drawn = [] if facts is None else list(facts.report.missing)
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
    return model, facts


def _build(section: ModelSection, project_dir: Path, origin: Origin) -> nn.Module:
    """Builds a model that has no pretrained weights."""
    section, target = _find(section, project_dir)
    with _located("model: ", section.origin):
        if isinstance(target, type) and is_transformers_class(target):
            return build_transformers(target, _plain(section.arguments))[0]
        if isinstance(target, type) and issubclass(target, Model) and "preset" in section.arguments:
            arguments = _plain(section.arguments)
            with _located("model: ", origin("model.preset")):
                arguments = preset_settings(target, arguments.pop("preset"), **arguments)
            registry.check_arguments(target, arguments, label="model", where=section.origin)
            return target(**arguments)
        return _instantiate(section, project_dir)


def _find(section: ModelSection, project_dir: Path) -> tuple[ModelSection, Any]:
    """Returns the class, and the section without a preset that was taken back by null."""
    target = registry.find("model", section.type, project_dir=project_dir, where=section.origin, label="model")
    if isinstance(target, type) and issubclass(target, Model) and section.get("preset", "") is None:
        kept = ModelSection.from_mapping({key: value for key, value in section.items() if key != "preset"})
        section = kept.located_at(section.origin)  # type: ignore[assignment]  # the same class
    return section, target


def _build_pretrained(
    section: ModelSection, project_dir: Path, pretrained: _Pretrained, origin: Origin, kept: PretrainedFacts | None
) -> tuple[nn.Module, PretrainedFacts]:
    """Builds a model and loads its pretrained weights, or with `kept` gives it the sizes and dtypes that it had."""
    section, target = _find(section, project_dir)
    with _located("model: ", section.origin), _located("model.pretrained: ", pretrained.where, CheckpointError):
        folder = None if kept is not None else _find_folder(pretrained)
        config = None if kept is None else kept.config
        if isinstance(target, type) and is_transformers_class(target):
            model, report = _build_theirs(target, _plain(section.arguments), pretrained, folder, config)
        elif isinstance(target, type) and issubclass(target, Model):
            if "preset" in section.arguments:
                problem = "preset and pretrained both say how large the model is. Keep one of the two."
                raise ConfigError(f"model: {problem}", where=origin("model.preset"))
            model, report = _build_ours(target, section, pretrained, folder, config)
        else:
            model, report = _instantiate(section, project_dir), LoadReport((), ())
            if folder is not None:
                report = load_weights(model, folder, **pretrained.options)
        if kept is not None:
            give_dtypes(model, kept, dtype=pretrained.dtype)
            return model, kept
        assert folder is not None
        config = read_config_file(folder) if (folder / CONFIG_FILE).is_file() else None
        return model, gather_facts(config, report, model, dtype=pretrained.dtype)


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
    arguments = _plain(section.arguments)
    registry.check_arguments(target, arguments, label="model", where=section.origin, provided=_parameters(target))
    if folder is not None:
        return target.load_pretrained(folder, **pretrained.options, **arguments)
    assert config is not None
    return target.from_config(config, **arguments), LoadReport((), ())


def _instantiate(section: ModelSection, project_dir: Path) -> nn.Module:
    model = registry.instantiate("model", section, project_dir=project_dir, label="model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{section.type} gives a {type(model).__name__}, not a torch.nn.Module.")
    return model


@dataclass(frozen=True)
class _Pretrained:
    """The setting `model.pretrained`, checked."""

    folder: str | Path
    home_path: str | Path | None = None
    strict: bool = True
    dtype: torch.dtype = torch.float32
    """Not the files' own unless that is asked for: weights of 16 bits would lose the small updates of a training."""
    has_dtype: bool = False
    """Was one asked for?"""
    allow_pickle: bool = False
    where: object | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `load_weights` and `load_pretrained`."""
        return {"strict": self.strict, "dtype": self.dtype, "allow_pickle": self.allow_pickle}


def _find_folder(pretrained: _Pretrained) -> Path:
    try:
        return find_folder(pretrained.folder, home_path=pretrained.home_path)
    except CheckpointError as error:
        raise CheckpointError(
            f"model.pretrained: {error.problem} It is needed, for the run has no checkpoint yet that could give the "
            "weights.",
            where=pretrained.where,
        ) from error


def _read_pretrained(given: Any, project_dir: Path, origin: Origin) -> _Pretrained | None:
    """Reads `pretrained: folder` or `{folder: …, strict: false}`; a folder beside the run file is found there."""
    if given is None:
        return None
    settings: Any = {"folder": given} if isinstance(given, (str, Path)) else given
    if not isinstance(settings, Mapping) or not isinstance(settings.get("folder"), (str, Path)):
        raise ConfigError(
            f"model.pretrained: give a folder, or {{folder: …, strict: false}}; got {describe(given)}.",
            where=origin("model.pretrained"),
        )
    settings = {key: value for key, value in settings.items() if value is not None}

    def refuse(key: str, problem: str) -> NoReturn:
        raise ConfigError(f"model.pretrained.{key}: {problem}", where=origin(f"model.pretrained.{key}"))

    for key, value in settings.items():
        if key not in PRETRAINED_KEYS:
            refuse(key, f"is unknown. Known: {', '.join(PRETRAINED_KEYS)}.")
        if key in ("strict", "allow_pickle") and not isinstance(value, bool):
            refuse(key, f"must be true or false, got {value!r}.")
        if key == "home_path" and not isinstance(value, (str, Path)):
            refuse(key, f"must be a folder, got {value!r}.")
    dtype = None
    if "dtype" in settings:
        try:
            dtype = as_dtype(settings["dtype"])
        except ConfigError as error:
            refuse("dtype", error.problem)
    folder = project_dir / Path(settings["folder"]).expanduser()
    return _Pretrained(
        folder=folder if folder.is_dir() else settings["folder"],
        home_path=settings.get("home_path"),
        strict=settings.get("strict", True),
        dtype=dtype or torch.float32,
        has_dtype=dtype is not None,
        allow_pickle=settings.get("allow_pickle", False),
        where=origin("model.pretrained"),
    )


def _rules(given: Any, origin: Origin) -> dict[str, Component]:
    where = origin("model.replace")
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f'model.replace: must be a mapping such as {{"layers.*.mlp": {{type: my.py:MyMLP}}}}; got {describe(given)}.',
            where=where,
        )
    rules = {}
    for glob, rule in given.items():
        if isinstance(rule, str):
            rules[glob] = Component(rule)
        elif isinstance(rule, Mapping) and isinstance(rule.get("type"), str):
            rules[glob] = Component.from_mapping(rule)
        else:
            raise ConfigError(f'model.replace."{glob}": must be a component with a type; got {describe(rule)}.', where=where)
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
            f'model.lora: must be a mapping such as {{match: "*.q_proj", rank: 8}}; got {describe(given)}.', where=where
        )
    settings: dict[str, Any] = _plain(given)
    registry.check_arguments(add_lora, settings, label="model.lora", where=where, provided=("model",))
    return settings


@contextmanager
def _located(start: str, where: object | None, kind: type[TrainwrightError] = ConfigError) -> Iterator[None]:
    """Says of errors of a kind inside to which part of the section they belong, and where that was written."""
    try:
        yield
    except kind as error:
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
