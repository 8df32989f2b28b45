"""Adapters of Hugging Face's peft: `model.peft: {type: lora, r: 8, target_modules: all-linear}`.

peft changes the model in place, so the model keeps its class; with prompt learning, however, peft's own model computes
the forward. lora.py has adapters without peft.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.config.problems import describe, suggest
from trainwright.errors import CheckpointError, ConfigError
from trainwright.events.mean import IGNORED_LABEL
from trainwright.models.transformers_models import count_targets

logger = logging.getLogger(__name__)

_ALIASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "DORA": ("LORA", {"use_dora": True}),
    "RSLORA": ("LORA", {"use_rslora": True}),
}
_PROVIDED = ("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode")
"""Fields of peft's configs that describe a saved adapter; a run cannot set them."""
_NAMES_OF_LORA = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "match": "target_modules"}
"""What `model.lora` calls fields of peft's LoraConfig."""
_FROM_RANDOM = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initializations of LoRA that leave the base weights unchanged; the others (pissa, olora, loftq, …) change them."""
_IDENTITY = (True, None, "gaussian", "eva")
"""Initializations with which the model computes exactly the same as without the adapter."""
_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "experts")
ADAPTER = "default"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def _import_peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        advice = 'Install it: pip install "trainwright[peft]". Without it, use model.lora.'
        problem = f"peft: needs the package peft. {advice}"
        raise ConfigError(problem) from error
    return peft


def read_peft_settings(given: Any, *, origin: Callable[[str], object | None]) -> Any:
    """Returns the config object of peft for the setting `model.peft`; rejects unknown keys by name and line."""
    settings: dict[str, Any] = {"type": given} if isinstance(given, str) else dict(given) if given else {}
    where = origin("model.peft")
    key = next((name for name in ("type", "peft_type") if name in settings), None)
    if key is None:
        example = "{type: lora, r: 8, target_modules: all-linear}"
        raise ConfigError(f"model.peft: must be a mapping such as {example}; got {describe(given)}.", where=where)
    kind = settings.pop(key)
    config_class, options = _find_config(kind, where=origin(f"model.peft.{key}") or where)
    known = [each.name for each in dataclasses.fields(config_class) if each.init and each.name not in _PROVIDED]
    for name in settings:
        if name not in known:
            other = _NAMES_OF_LORA.get(name)
            advice = f'Did you mean "{other}"?' if other in known else suggest(name, known)
            problem = f"model.peft.{name}: {config_class.__name__} has no such field. {advice}"
            raise ConfigError(problem, where=origin(f"model.peft.{name}") or where)
    try:
        return config_class(**{**options, **settings})
    except Exception as error:  # peft's own checks raise errors of several types
        raise ConfigError(f"model.peft: {config_class.__name__} rejects it: {error}", where=where) from error


def _find_config(kind: Any, *, where: object | None) -> tuple[type[Any], dict[str, Any]]:
    """Returns the config class of `lora`, `LORA`, `dora`, `LoraConfig` or `peft:LoraConfig`, and implied fields."""
    peft = _import_peft()
    known = {name.value: config for name, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = str(kind).removeprefix("peft:").removeprefix("peft.")
    by_class = {config.__name__: config for config in known.values()}
    if name in by_class:
        return by_class[name], {}
    name, options = _ALIASES.get(name.upper().replace("-", "_"), (name.upper().replace("-", "_"), {}))
    if name in known:
        return known[name], options
    names = [each.lower() for each in (*known, *_ALIASES)]
    raise ConfigError(f'model.peft.type: peft has no "{kind}". {suggest(str(kind).lower(), names)}', where=where)


def add_peft(model: nn.Module, config: Any, *, drawn: Iterable[str]) -> nn.Module:
    """Adds the adapter of a peft config and freezes the rest; returns the model to train.

    It is the same model, except for prompt learning. The modules of the parameters in `drawn`, which have no pretrained
    values, are trained and saved as well (peft's `modules_to_save`).
    """
    peft = _import_peft()
    if config.is_prompt_learning and config.task_type is None:
        raise ConfigError("peft.task_type: is required for prompt learning, for example CAUSAL_LM.")
    names = dict(model.named_parameters(remove_duplicate=False))
    modules = sorted({name.rpartition(".")[0] for name in drawn if name in names})
    own = list(getattr(config, "modules_to_save", None) or ())
    added = [module for module in modules if module and not _is_covered(module, own)]
    if added and hasattr(config, "modules_to_save"):
        config.modules_to_save = [*own, *added]
        logger.info("model.peft: parameters without pretrained weights are trained too: %s", ", ".join(added))
    targets = getattr(config, "target_modules", None)  # peft replaces all-linear by names
    try:
        with contextlib.redirect_stdout(sys.stderr):
            wrapped: Any = peft.get_peft_model(model, config, adapter_name=ADAPTER)
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError) as error:
        advice = _advice(error, model)
        raise ConfigError(f"peft: {type(model).__name__} with {type(config).__name__}: {error}{advice}") from error
    _warn_of_fused_experts(model, config, targets)
    if not config.is_prompt_learning:
        return model
    return _with_count(wrapped, is_causal=_value(config.task_type) == "CAUSAL_LM")


def _value(name: Any) -> Any:
    return getattr(name, "value", name)


def _with_count(model: Any, *, is_causal: bool) -> nn.Module:
    """Gives a model of peft `count_targets`, the weight of its loss; loop/outputs.py reads it from the class."""

    def count(self: Any, labels: torch.Tensor) -> torch.Tensor | None:
        # The last virtual token predicts the first label, so the labels of all tokens count.
        return (labels != IGNORED_LABEL).sum() if is_causal else count_targets(self.get_base_model(), labels)

    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"count_targets": count, "__module__": kind.__module__})
    assert isinstance(model, nn.Module)
    return model


def _is_covered(module: str, names: Iterable[str]) -> bool:
    return any(module == name or module.endswith(f".{name}") or module.startswith(f"{name}.") for name in names)


def _advice(error: Exception, model: nn.Module) -> str:
    if "target_modules" in str(error) or "Target modules" in str(error):
        linear = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        return f" Its linear layers: {', '.join(sorted(linear)) or 'none'}; target_modules: all-linear names all."
    return ""


def _warn_of_fused_experts(model: nn.Module, config: Any, targets: Any) -> None:
    """Warns about experts that are one 3-D parameter per block, because `target_modules` matches only linear layers.

    peft adapts those of some architectures by itself.
    """
    named = [targets] if isinstance(targets, str) else list(targets or ())
    if not any(each == "all-linear" or each.rpartition(".")[2] in _EXPERT_NAMES for each in named):
        return
    wrappers: list[Any] = [each for each in model.modules() if hasattr(each, "parameter_name")]
    adapted = {id(getattr(each.get_base_layer(), each.parameter_name)) for each in wrappers}
    skipped = [
        (module_name, name)
        for module_name, module in model.named_modules()
        if not type(module).__module__.startswith(("torch.", "peft."))
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and id(parameter) not in adapted and not parameter.requires_grad
    ]
    if not skipped:
        return
    paths = [f"{module}.{name}".replace(".base_layer.", ".") for module, name in skipped]
    ends = sorted({".".join(path.split(".")[-3:]) for path in paths})
    advice = f"Add them: target_parameters: [{', '.join(ends)}]"
    if not hasattr(config, "target_parameters"):
        advice = f"{type(config).__name__} cannot adapt them; type: lora can, with target_parameters"
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    logger.warning(
        "model.peft: target_modules %s reaches linear layers only. These fused experts (3-D parameters) get no adapter "
        "and stay frozen: %s%s. %s.",
        ", ".join(named),
        ", ".join(paths[:4]),
        more,
        advice,
    )


def renamed_by_peft(model: nn.Module, before: Mapping[int, str], loaded: Iterable[str]) -> frozenset[str]:
    """Returns the current names of loaded parameters; `before` has their earlier names by id.

    Base weights that the initialization of the adapter has changed are omitted.
    """
    config = peft_config_of(model)
    changes_base = getattr(config, "init_lora_weights", True) not in _FROM_RANDOM
    wanted = set(loaded)
    return frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if before.get(id(parameter)) in wanted and not (changes_base and ".base_layer." in name)
    )


def peft_config_of(model: nn.Module) -> Any:
    """Returns the config of the adapter of a model; None without an adapter of peft."""
    configs: Any = getattr(model, "peft_config", None)
    return configs.get(ADAPTER) if isinstance(configs, Mapping) else None


def keeps_base(model: nn.Module) -> bool:
    """Returns True if the model without its peft adapter has the same outputs as before the first step."""
    config = peft_config_of(model)
    if config.is_prompt_learning or any(
        getattr(config, name, True) not in _IDENTITY
        for name in ("init_lora_weights", "init_ia3_weights", "init_weights")
    ):
        return False
    inside = [name for name, module in model.named_modules() if hasattr(module, "_disable_adapters")]
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    return all(any(name.startswith(f"{one}.") for one in inside) for name in trained)


@contextlib.contextmanager
def without_peft(model: nn.Module) -> Iterator[None]:
    """Within the context the outputs are those of the base weights; see `keeps_base`."""
    # Not peft's own method, which changes requires_grad as well.
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [module._disable_adapters for module in modules]
    for module in modules:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module._disable_adapters = value


def save_peft(model: nn.Module, folder: Path, *, base: str | None) -> None:
    """Writes the adapter into a folder that `PeftModel.from_pretrained(base_model, folder)` loads."""
    from safetensors.torch import save_file

    peft = _import_peft()
    config = peft_config_of(model)
    if config is None:
        raise CheckpointError(f"{type(model).__name__} has no adapter of peft.")
    state = peft.get_peft_model_state_dict(model, adapter_name=ADAPTER)
    if not config.is_prompt_learning:  # peft's model has the model under this name
        state = {f"base_model.model.{name}": value for name, value in state.items()}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    saved = dataclasses.replace(config, inference_mode=True, base_model_name_or_path=base)
    saved.save_pretrained(folder)
