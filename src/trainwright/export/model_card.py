"""The model card of an export, README.md: the base model, the data, the settings, the metrics and how to load it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import yaml

from trainwright.config import RunConfig, yaml_text
from trainwright.export.load import is_path, without_paths
from trainwright.safe_text import mask_secrets

CARD_FILE = "README.md"

_TRAINER_SETTINGS = (
    "type",
    "max_steps",
    "global_batch_size",
    "optimizer",
    "optimizers",
    "schedule",
    "max_grad_norm",
    "loss",
)


_TASKS = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForImageClassification": "image-classification",
}
"""The hub's task names, by the suffix of the class name."""

Library = Literal["transformers", "peft", "trainwright", "safetensors"]


def model_card(
    config: RunConfig,
    *,
    step: int,
    metrics: Mapping[str, float],
    class_name: str,
    num_parameters: int,
    library: Library,
    base_model: str | None,
    architecture: str | None,
) -> str:
    """Returns the text of the card.

    `library` is the one that loads the export, and `architecture` the class of transformers in its config.json.
    `base_model` is a name on the hub, and None for weights from scratch or from a local folder. Paths of this machine
    and secrets are omitted.
    """
    facts: dict[str, Any] = {"library_name": library, "tags": ["trainwright"]}
    if base_model is not None:
        facts["base_model"] = base_model
    task = next((task for ending, task in _TASKS.items() if (architecture or "").endswith(ending)), None)
    if task is not None:
        facts["pipeline_tag"] = task
    begin = (
        "from scratch" if config.model is None or "pretrained" not in config.model.reserved else "from other weights"
    )
    if base_model is not None:
        begin = f"from [{base_model}](https://huggingface.co/{base_model})"
    parts = [
        f"---\n{yaml_text.write(facts)}---",
        f"# {_title(config.name)}",
        f"A {class_name} with {num_parameters:,} parameters, trained {begin} for {step:,} steps with trainwright.",
        "## Use",
        _usage(library, architecture, base_model),
        "## Data",
        _block(_chosen(config, "data", ("train", "eval", "split", "process", "collator"))),
        "## Settings",
        _block(_settings(config)),
    ]
    if metrics:
        parts += ["## Metrics", _table(metrics)]
    return mask_secrets("\n\n".join(parts)) + "\n"


def card_metrics(history: Mapping[str, list[tuple[int, float]]], step: int, *, has_best: bool) -> dict[str, float]:
    """Returns the last value of each metric of an evaluation up to a step, and of the training loss.

    `history` is that of metrics.json. The test set is omitted if the run keeps the best checkpoint, because it is then
    evaluated with that one, which may be of another step.
    """
    found = {}
    for name, values in history.items():
        is_evaluation = "/" in name and not name.startswith("lr/") and not (has_best and name.startswith("test/"))
        known = [value for at, value in values if at <= step and math.isfinite(value)]
        if known and (is_evaluation or name == "loss"):
            found[name] = known[-1]
    return found


def hub_name(source: str | None) -> str | None:
    """Returns a source of weights that is a name on the hub, such as meta-llama/Llama-3.2-1B; None for a folder."""
    is_name = source is not None and not is_path(source) and source.count("/") <= 1 and not source.startswith(".")
    return source if is_name else None


def _settings(config: RunConfig) -> dict[str, Any]:
    every = yaml.safe_load(config.to_yaml())
    model = {} if config.model is None else every["model"]
    model.pop("pretrained", None)
    return {
        "model": model,
        **_chosen(config, "trainer", _TRAINER_SETTINGS),
        "seed": config.seed,
        "runtime": {"precision": config.runtime.precision},
    }


def _chosen(config: RunConfig, section: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings of a section that are set, in this order."""
    every = yaml.safe_load(config.to_yaml()).get(section) or {}
    return {section: {name: every[name] for name in names if every.get(name) not in (None, {}, [])}}


def _block(settings: dict[str, Any]) -> str:
    return f"```yaml\n{yaml_text.write(without_paths(settings))}```"


def _table(metrics: Mapping[str, float]) -> str:
    rows = [f"| {name} | {value:.6g} |" for name, value in sorted(metrics.items())]
    return "\n".join(("| metric | value |", "| --- | --: |", *rows))


def _title(name: str) -> str:
    return " ".join(name.split())


def _usage(library: Library, architecture: str | None, base_model: str | None) -> str:
    folder = '"path/to/this/folder"'
    if library == "peft":
        base = "base = ...  # the model that the adapter was trained with"
        if base_model is not None:
            base = f'base = AutoModelForCausalLM.from_pretrained("{base_model}")'
        lines = ["from peft import PeftModel"]
        lines += ["from transformers import AutoModelForCausalLM"] if base_model is not None else []
        lines += ["", base, f"model = PeftModel.from_pretrained(base, {folder})"]
    elif library == "transformers":
        lines = [f"from transformers import {architecture}", "", f"model = {architecture}.from_pretrained({folder})"]
    elif library == "trainwright":
        lines = ["from trainwright import AutoModel", "", f"model = AutoModel.from_pretrained({folder})"]
    else:
        lines = ["from pathlib import Path", "", "from safetensors.torch import load_file", "", "weights = {}"]
        lines += [f'for file in Path({folder}).glob("*.safetensors"):', "    weights |= load_file(file)"]
    code = "\n".join(lines)
    names = "The names of the weights are those of the model, whose settings are in `model.yaml`.\n\n"
    return f"{names if library == 'safetensors' else ''}```python\n{code}\n```"
