"""The settings of a model, as its constructor keeps them and as a config.json may contradict them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.errors import ConfigError

AUTO_CLASSES = {
    "Llama": "AutoModelForCausalLM",
    "GPT2": "AutoModelForCausalLM",
    "Bert": "AutoModelForMaskedLM, or AutoModelForSequenceClassification",
}
"""The classes of transformers that train what a shipped model cannot."""


def keywords_of(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a constructor's keywords from its `locals()`; to be called before it makes variables of its own."""
    return {name: value for name, value in variables.items() if name not in ("self", "__class__")}


def refuse_other_values(config: Mapping[str, Any], supported: Mapping[str, Any], *, model: str) -> None:
    """Refuses a config.json that asks for what the model cannot do: only the supported value, or none, will do."""
    for name, value in supported.items():
        if config.get(name, value) != value:
            raise ConfigError(
                f"config.json says {name}: {config[name]!r}, but {model} can only do {value!r}. "
                f"Train this model by transformers' own class: model.type: transformers:{AUTO_CLASSES[model]}."
            )
