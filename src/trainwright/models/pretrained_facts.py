"""The facts of a pretrained folder, stored in the run folder, so that a resumed run does not need the pretrained
folder.

RUN/pretrained.json has the content of the folder's config.json with the sizes, its generation settings, and the names
of missing weights. The weights are in the run's checkpoints. build/run.py writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.errors import CheckpointError
from trainwright.models.pretrained import CONFIG_FILE, LoadReport, read_config_file, read_json
from trainwright.models.saving import write_json

FACTS_FILE = "pretrained.json"
GENERATION_FILE = "generation_config.json"

PATH_KEYS = ("_name_or_path", "name_or_path")
"""Keys of a config.json with paths of the machine that wrote it."""


@dataclass(frozen=True)
class PretrainedFacts:
    """The facts of a pretrained folder that are needed to rebuild its model without it."""

    config: Mapping[str, Any] | None
    """The content of config.json, without paths; None if the model section has the sizes."""
    report: LoadReport
    """The weights that the files lacked (they are trained even with adapters), and unexpected keys."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The names and dtypes of weights that have another dtype than the requested one."""
    generation: Mapping[str, Any] | None = None
    """The folder's generation settings (end tokens, sampling); None without any."""
    loaded: frozenset[str] = field(default=frozenset(), compare=False)
    """The parameters that this start has read from the folder; not in the file."""


def gather_facts(folder: Path, report: LoadReport, model: nn.Module, *, dtype: torch.dtype) -> PretrainedFacts:
    """Returns the facts of a model that has just been loaded from a folder; `dtype` is the requested one."""
    others = {
        name: str(weight.dtype).removeprefix("torch.")
        for name, weight in _weights(model).items()
        if weight.is_floating_point() and weight.dtype != dtype
    }
    config = without_paths(read_config_file(folder)) if (folder / CONFIG_FILE).is_file() else None
    # A model of transformers has read its generation settings, which old folders have in config.json.
    theirs: Any = getattr(model, "generation_config", None)
    content = None
    if theirs is not None:
        content = json.loads(theirs.to_json_string())
    elif (folder / GENERATION_FILE).is_file():
        content = read_json(folder / GENERATION_FILE)
    return PretrainedFacts(config, report, others, without_paths(content) if isinstance(content, dict) else None)


def restore_facts(model: nn.Module, facts: PretrainedFacts, *, dtype: torch.dtype) -> None:
    """Restores the dtypes of a rebuilt model and, for transformers models, the generation settings."""
    for name, weight in _weights(model).items():
        if weight.is_floating_point():
            weight.data = weight.data.to(getattr(torch, facts.dtypes[name]) if name in facts.dtypes else dtype)
    theirs: Any = getattr(model, "generation_config", None)
    if theirs is not None and facts.generation is not None:
        model.generation_config = theirs.from_dict(dict(facts.generation))


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json's content without paths, also those of inner configs."""
    return {
        key: without_paths(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in PATH_KEYS
    }


def write_facts(run_folder: Path, facts: PretrainedFacts) -> None:
    """Writes RUN/pretrained.json atomically."""
    content = {
        "config": facts.config,
        "missing": list(facts.report.missing),
        "unexpected": list(facts.report.unexpected),
        "dtypes": dict(facts.dtypes),
        "generation": facts.generation,
    }
    path = run_folder / FACTS_FILE
    staging = path.with_name(f".{FACTS_FILE}.writing")
    write_json(staging, content)
    staging.replace(path)


def read_facts(run_folder: Path) -> PretrainedFacts | None:
    """Returns the content of RUN/pretrained.json; None if there is no such file."""
    path = run_folder / FACTS_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        report = LoadReport(tuple(content["missing"]), tuple(content["unexpected"]))
        facts = PretrainedFacts(content["config"], report, content["dtypes"], content.get("generation"))
        if not isinstance(facts.config, dict | None) or not isinstance(facts.generation, dict | None):
            raise TypeError("its config or generation is not an object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}. Remove it: the pretrained folder is then read again."
        ) from error
    return facts


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters and saved buffers by name, tied ones once; not the computed buffers."""
    saved = set(model.state_dict(keep_vars=True))
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}
