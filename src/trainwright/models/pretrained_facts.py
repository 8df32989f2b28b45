"""What a pretrained folder told a run at its first start, kept in the run folder: later starts live without the folder.

RUN/pretrained.json holds the content of the folder's config.json, which says the sizes, how it says to continue a
text, and which weights its files lacked and so were drawn. The weights themselves are in the run's checkpoints. Who
writes it, and when, is build.py's.
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
from trainwright.models.pretrained import LoadReport, read_json
from trainwright.models.saving import write_json

FACTS_FILE = "pretrained.json"
GENERATION_FILE = "generation_config.json"

PATH_KEYS = ("_name_or_path", "name_or_path")
"""Keys of a config.json that say where it once lay: paths of somebody's machine, and no fact of the model."""


@dataclass(frozen=True)
class PretrainedFacts:
    """What must be known of a pretrained folder to build its model again without it."""

    config: Mapping[str, Any] | None
    """The content of config.json, without paths; None where the model's own settings say its sizes."""
    report: LoadReport
    """What the files lacked (it was drawn, so it is trained beside adapters), and what they had besides."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """The names and dtypes of those weights that have another dtype than was asked for."""
    generation: Mapping[str, Any] | None = None
    """How the folder says to continue a text (the tokens that end it, sampling); None where it does not."""


def gather_facts(
    config: Mapping[str, Any] | None, report: LoadReport, model: nn.Module, *, dtype: torch.dtype
) -> PretrainedFacts:
    """Returns the facts of a model that has just been loaded, and for which weights of `dtype` were asked."""
    others = {
        name: str(weight.dtype).removeprefix("torch.")
        for name, weight in _weights(model).items()
        if weight.is_floating_point() and weight.dtype != dtype
    }
    return PretrainedFacts(None if config is None else without_paths(config), report, others)


def give_dtypes(model: nn.Module, facts: PretrainedFacts, *, dtype: torch.dtype) -> None:
    """Gives the weights of a model that was built anew the dtypes that they had when they were loaded."""
    for name, weight in _weights(model).items():
        if weight.is_floating_point():
            weight.data = weight.data.to(getattr(torch, facts.dtypes[name]) if name in facts.dtypes else dtype)


def read_generation(model: nn.Module, folder: Path) -> dict[str, Any] | None:
    """Returns what a folder says of generation, for a model that was loaded from it.

    A model of transformers has read it; that of an old folder stands in its config.json.
    """
    theirs: Any = getattr(model, "generation_config", None)
    path = folder / GENERATION_FILE
    content = read_json(path) if theirs is None and path.is_file() else None
    if theirs is not None:
        content = json.loads(theirs.to_json_string())
    return without_paths(content) if isinstance(content, dict) else None


def give_generation(model: nn.Module, facts: PretrainedFacts) -> None:
    """Gives a model of transformers that was built anew what it had read of generation; ours keep none."""
    theirs: Any = getattr(model, "generation_config", None)
    if theirs is not None and facts.generation is not None:
        model.generation_config = theirs.from_dict(dict(facts.generation))


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json's content without the places where it once lay, those of inner configs included."""
    return {
        key: without_paths(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in PATH_KEYS
    }


def write_facts(run_folder: Path, facts: PretrainedFacts) -> None:
    """Writes RUN/pretrained.json, whole or not at all."""
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
    """Returns what RUN/pretrained.json holds; None where there is none."""
    path = run_folder / FACTS_FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        report = LoadReport(tuple(content["missing"]), tuple(content["unexpected"]))
        facts = PretrainedFacts(content["config"], report, content["dtypes"], content.get("generation"))
        if not isinstance(facts.config, dict | None) or not isinstance(facts.generation, dict | None):
            raise TypeError("its config or generation is no object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}. Remove it: the pretrained folder is then read again."
        ) from error
    return facts


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and saved buffers by name, tied ones once; computed buffers are the constructor's affair."""
    saved = set(model.state_dict(keep_vars=True))
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    return weights | {name: buffer for name, buffer in model.named_buffers() if name in saved}
