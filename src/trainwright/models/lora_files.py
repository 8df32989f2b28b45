"""Adapters as files, without the model beside which they were trained, in the layout of the PEFT library.

A folder holds adapter_config.json and adapter_model.safetensors. Layers are named as in this model; for a model whose
names are transformers', PEFT loads the folder as it is. What adapters are is in lora.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.lora import adapt, load_lora, lora_layers, lora_state

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# PEFT wraps the model twice and calls the two matrices by these names.
PREFIX = "base_model.model."
THEIR_ENDS: Mapping[str, str] = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

# What PEFT can do beside, and the values that mean that it was not done.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None,),
    "target_parameters": (None, []),
}


def save_lora(model: nn.Module, folder: str | Path, *, base: str | None = None) -> Path:
    """Writes the adapters, and every other parameter that is trainable, to a folder; returns it.

    `base` is the name or folder of the weights beside which they were trained, for the reader.
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
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_their_name(name): value.cpu().contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


def load_lora_folder(model: nn.Module, folder: str | Path) -> list[str]:
    """Adds the adapters that a folder holds to a model without any, and loads them; returns the layers' names.

    Also reads what PEFT wrote. Adapters of a kind that lora.py does not have are refused by name.
    """
    folder = Path(folder)
    config, state = _read(folder)
    for key, plain in UNSUPPORTED.items():
        if config.get(key) not in plain:
            raise ConfigError(f"{key} is {config[key]!r}, which is not supported here.", where=folder / CONFIG_FILE)
    layers = [name.removesuffix(".lora_a") for name in state if name.endswith(".lora_a")]
    known = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    strange = [name for name in layers if name not in known]
    if strange or not layers:
        found = f"adapters for {', '.join(strange[:5])}, no linear layers of this model" if strange else "no adapters"
        raise ConfigError(f"The folder holds {found}. Is it that of another model?", where=folder)
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    beside = [name for name in state if not name.endswith((".lora_a", ".lora_b"))]
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    adapt(
        model,
        layers,
        rank=rank,
        alpha=alpha * math.sqrt(rank) if config.get("use_rslora") else alpha,  # that divides by the root of the rank
        dropout=config.get("lora_dropout", 0.0),
        train=[name for name in beside if name in own],  # load_lora names the others
    )
    load_lora(model, state)
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
