"""Adapters as files, without the model beside which they were trained, in the layout of the PEFT library.

A folder holds adapter_config.json and adapter_model.safetensors. Layers are named as in this model; for a model whose
names are transformers', PEFT loads the folder as it is. What adapters are, and how they are merged, is in lora.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.lora import (
    adapt,
    check_lora_settings,
    load_lora_state,
    lora_layers,
    lora_state,
    refuse_misfit,
)
from trainwright.models.saving import as_stored, has_files_of_others, is_model_folder, staged, write_json, write_tensors

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# PEFT wraps the model twice and calls the two matrices by these names.
PREFIX = "base_model.model."
THEIR_ENDS: Mapping[str, str] = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

# What adapter_config.json may say without a change of what the adapters compute. Everything else that it says must be
# empty (null, false, [], {}): a kind of adapter that is not known here would load, and give other answers.
KNOWN_KEYS = (
    "peft_type",
    "peft_version",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "task_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "megatron_core",
    "qalora_group_size",
    "eva_config",
)
# Of these some values change nothing, either. Other ways to start (pissa, olora, loftq …) change the weights beside.
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def save_lora(model: nn.Module, folder: str | Path, *, base: str | None = None) -> Path:
    """Writes the adapters, and every other parameter that is trainable, to a folder; returns it.

    `base` is the name or folder of the weights beside which they were trained, for the reader. The folder's other
    files are kept; one that holds neither adapters nor a model is refused.

    >>> from trainwright.models.llama import Llama
    >>> from trainwright.models.lora import add_lora, merge_lora
    >>> from trainwright.models.lora_files import load_lora, save_lora
    >>> pretrained = Llama.from_preset("tiny").save_pretrained("pretrained")
    >>> model = Llama.from_pretrained(pretrained)
    >>> layers = add_lora(model, match="*.q_proj", rank=2)
    >>> folder = save_lora(model, "adapters")  # after its training
    >>> model = Llama.from_pretrained(pretrained)
    >>> load_lora(model, folder) == layers
    True
    >>> merge_lora(model) == layers  # plain layers again, to be saved or exported
    True
    """
    layers = dict(lora_layers(model))
    if not layers:
        raise ConfigError("lora: the model has no adapters to save. Call add_lora first.")
    state = lora_state(model)
    beside = [name for name in state if not name.endswith((".lora_a", ".lora_b"))]
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": first.lora_rank,
        "lora_alpha": first.lora_alpha,
        "lora_dropout": first.lora_dropout,
        "target_modules": list(layers),
        "modules_to_save": list(dict.fromkeys(name.rpartition(".")[0] for name in beside)) or None,
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
    }
    folder = Path(folder)
    is_ours = (folder / CONFIG_FILE).is_file() or is_model_folder(folder)
    if not is_ours and has_files_of_others(folder):
        raise CheckpointError(
            f"{folder} has files and holds neither adapters nor a model, so nothing is written there. Choose another, "
            "or empty it."
        )
    with staged(folder) as staging:
        write_tensors(
            {_their_name(name): as_stored(value).clone() for name, value in state.items()}, staging / WEIGHTS_FILE
        )
        write_json(staging / CONFIG_FILE, config)
    return folder


def load_lora(model: nn.Module, folder: str | Path) -> list[str]:
    """Adds the adapters that a folder holds to a model without any, and loads them; returns the layers' names.

    Also reads what PEFT wrote. Adapters of a kind that lora.py does not have are refused by name. A model for which
    anything is refused stays as it was.
    """
    folder = Path(folder)
    config, state = _read(folder)
    for key, value in config.items():
        is_plain = value in PLAIN_VALUES[key] if key in PLAIN_VALUES else key in KNOWN_KEYS or not value
        if not is_plain:
            raise ConfigError(
                f"{key} is {value!r}, which is not supported here. Let PEFT merge these adapters into the model, and "
                "load that.",
                where=folder / CONFIG_FILE,
            )
    layers = [name.removesuffix(".lora_a") for name in state if name.endswith(".lora_a")]
    known = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    strange = [name for name in layers if name not in known]
    if strange or not layers:
        found = f"adapters for {', '.join(strange[:5])}, no linear layers of this model" if strange else "no adapters"
        raise ConfigError(f"The folder holds {found}. Is it that of another model?", where=folder)
    rank, alpha, dropout = config.get("r", 8), config.get("lora_alpha", 8), config.get("lora_dropout", 0.0)
    check_lora_settings(rank=rank, alpha=alpha, dropout=dropout)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
    adapters = {f"{name}.lora_a": (rank, known[name].in_features) for name in layers}
    adapters |= {f"{name}.lora_b": (known[name].out_features, rank) for name in layers}
    refuse_misfit(state, {**shapes, **adapters}, needed=adapters)
    adapt(
        model,
        layers,
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,  # that divides by the root of the rank
        dropout=dropout,
        train=[name for name in state if name not in adapters],
    )
    load_lora_state(model, state)
    return layers


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"There is no {name}. Give a folder that save_lora or PEFT wrote.", where=folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ValueError("its peft_type is not LORA")
    except ValueError as error:
        raise CheckpointError(f"This describes no LoRA adapter: {error}.", where=folder / CONFIG_FILE) from error
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"The file is damaged: {error}. Copy it again.", where=folder / WEIGHTS_FILE) from error
    return config, {_our_name(name): value for name, value in tensors.items()}


def _their_name(name: str) -> str:
    for ours, theirs in THEIR_ENDS.items():
        if name.endswith(ours):
            return PREFIX + name.removesuffix(ours) + theirs
    return PREFIX + name


def _our_name(name: str) -> str:
    name = name.removeprefix(PREFIX)
    for ours, theirs in THEIR_ENDS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name
