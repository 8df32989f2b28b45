"""Writes the model of a run as a folder that others read, in Hugging Face's layout or as plain safetensors."""

from __future__ import annotations

import contextlib
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.build.data import DatasetBuilder
from trainwright.checkpoint.folder import read_config
from trainwright.checkpoint.listing import CHECKPOINTS
from trainwright.config import RunConfig
from trainwright.config.yaml_text import absolute
from trainwright.data.tokenizer import TextTokenizer, tokenizer_of
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.export.load import FORMATS, export_folder, find_source, load_checkpoint, without_paths, write_settings
from trainwright.models.key_map import KeyMap
from trainwright.models.lora import merge_lora
from trainwright.models.model import Model
from trainwright.models.pretrained import as_dtype, listed
from trainwright.models.pretrained_facts import GENERATION_FILE, read_facts
from trainwright.models.saving import changes_of_theirs, write_json, write_weights
from trainwright.models.transformers_models import is_transformers_class
from trainwright.registry import resolve as registry

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
"""What transformers may keep of a tokenizer."""
FILES_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
"""What may say more of a tokenizer that is one file: names of its tokens, and how a conversation becomes a text."""


def find_tokenizer(config: RunConfig) -> Any:
    """Returns the tokenizer of a run's training data, or of its collator; None where neither has one."""
    registry.import_modules(config.imports, project_dir=config.project_dir, where=config.origin("imports"))
    if config.data.train is not None:
        builder = DatasetBuilder(project_dir=config.project_dir, seed=config.seed)
        found = tokenizer_of(builder.build("data.train", config.data.train))
        if found is not None:
            return found
    collator = registry.instantiate(
        "collator", config.data.collator, label="data.collator", project_dir=config.project_dir
    )
    return tokenizer_of(collator)


def save_tokenizer(tokenizer: Any, folder: Path) -> list[Path]:
    """Writes a tokenizer's files into a folder and returns them; one that is not kept in files has none."""
    if isinstance(tokenizer, TextTokenizer):
        source = tokenizer.path
        if source.is_file():
            beside = [source.parent / name for name in FILES_BESIDE]
            files = {source: TOKENIZER_FILE, **{path: path.name for path in beside}}
        else:
            files = {source / name: name for name in dict.fromkeys((*TOKENIZER_FILES, *FILES_BESIDE))}
        present = {path: name for path, name in files.items() if path.is_file()}
        for path, name in present.items():
            shutil.copyfile(path, folder / name)
        return [folder / name for name in present.values()]
    if hasattr(tokenizer, "save_pretrained"):  # transformers' own
        return [Path(path) for path in tokenizer.save_pretrained(folder) if Path(path).is_file()]
    if hasattr(tokenizer, "save"):  # the tokenizers library's
        tokenizer.save(str(folder / TOKENIZER_FILE))
        return [folder / TOKENIZER_FILE]
    return []


MAX_SHARD_BYTES = 5_000_000_000


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | str = "latest",
    file_format: str = "huggingface",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> Path:
    """Writes the model of a run, as it was at a step, into a folder, with the run's tokenizer; returns the folder.

    "huggingface" is what transformers and AutoModel read; "safetensors" is any model's weights under their own names,
    with the model's settings beside them. Adapters are merged into the weights. `dtype` (bf16, fp16, fp32) rounds them.

    An earlier export is replaced; files that others have put beside it are kept. Any other folder that has files is
    rejected unless `overwrite`, which replaces files of the same names and keeps the rest, too.
    """
    if file_format not in FORMATS:
        raise ConfigError(f"There is no format {file_format!r}. Use one of: {', '.join(FORMATS)}.", where="format")
    wanted = as_dtype(dtype)
    folder, run_folder = Path(folder), find_source(Path(run))[0]
    _check_outside(folder, run_folder)
    config = read_config(run_folder)
    assert config is not None  # find_source saw it
    with export_folder(folder, run=config.name, file_format=file_format, overwrite=overwrite) as staging:
        model = load_checkpoint(run, step)
        merge_lora(model)
        if wanted is not None:
            _reject_overflow(model, wanted)
            model = model.to(wanted)
        if file_format == "huggingface":
            write_hugging_face(model, staging, max_shard_bytes=max_shard_bytes)
            _add_generation(model, run_folder, staging)
        else:
            write_weights(model, staging, key_map=KeyMap(), max_shard_bytes=max_shard_bytes)
            write_settings(staging, _model_settings(model, config))
        _add_tokenizer(config, staging)
    return folder


def write_hugging_face(model: nn.Module, folder: Path, *, max_shard_bytes: int) -> None:
    """Writes a model that knows Hugging Face's layout (ours, or a class of transformers) into an empty folder."""
    if isinstance(model, Model):
        model.save_pretrained(folder, max_shard_bytes=max_shard_bytes)
        return
    save: Any = getattr(model, "save_pretrained", None)
    if save is None:
        raise CheckpointError(
            f"{type(model).__name__} has no save_pretrained, so it has no form in Hugging Face's layout. Export its "
            "weights under their own names: --format safetensors."
        )
    changed = changes_of_theirs(model) if is_transformers_class(type(model)) else []
    if changed:
        raise CheckpointError(
            f"Hugging Face's layout cannot hold this {type(model).__name__}, which transformers would compute "
            f"differently: {'; '.join(changed[:4])}. Export its weights under their own names: "
            "--format safetensors."
        )
    with (
        contextlib.redirect_stdout(sys.stderr),
        _generation_aside(model, folder),
    ):  # its bars are not what was asked for
        save(folder, max_shard_size=max_shard_bytes)


@contextlib.contextmanager
def _generation_aside(model: nn.Module, folder: Path) -> Iterator[None]:
    """Writes a generation_config.json as it was read: transformers reads what it then rejects to write (sampling
    settings without sampling, in many published folders), and with it the whole model.
    """
    settings: Any = getattr(model, "generation_config", None)
    if settings is None:
        yield
        return
    model.generation_config = type(settings)()
    try:
        yield
    finally:
        model.generation_config = settings
    if (folder / GENERATION_FILE).is_file():  # not for a class without generation
        settings.to_json_file(folder / GENERATION_FILE)


def _reject_overflow(model: nn.Module, dtype: torch.dtype) -> None:
    """Rejects to round weights that a dtype has no numbers for: they would be infinite."""
    lost = [
        f"{name} (up to {float(weight.abs().nan_to_num(posinf=0.0).max()):.3g})"
        for name, weight in model.state_dict().items()
        if weight.is_floating_point() and bool((weight.to(dtype).isinf() & weight.isfinite()).any())
    ]
    if lost:
        raise CheckpointError(
            f"As {str(dtype).removeprefix('torch.')} these weights would be infinite, for it ends at "
            f"{torch.finfo(dtype).max:.3g}: {listed(lost, at_most=8)}. Use bf16 or fp32, or leave the dtype out."
        )


def _model_settings(model: nn.Module, config: RunConfig) -> dict[str, Any]:
    """Returns the `model` section that builds this model, as far as it can be told without places of this machine.

    What is in the weights already (pretrained ones, merged adapters) or matters in training alone is left out.
    """
    if config.model is None:
        return {}  # a task or a trainer of the user's made it
    arguments: Mapping[str, Any] = config.model.arguments
    settings = {"type": config.model.type, **(model.settings if isinstance(model, Model) else arguments)}
    if "replace" in config.model.reserved:
        settings["replace"] = config.model.reserved["replace"]
    return {"model": without_paths(settings)}


def _add_tokenizer(config: RunConfig, folder: Path) -> None:
    """Saves the tokenizer of the run's data; weights are worth having without it, so a failure is only told."""
    try:
        tokenizer = find_tokenizer(config)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    except (TrainwrightError, OSError) as error:
        logger.warning("The run's tokenizer is not in the export: %s", error)


def _add_generation(model: nn.Module, run_folder: Path, folder: Path) -> None:
    """Writes how a run's pretrained folder said to continue a text, beside a model of ours, which keeps none of it."""
    facts = read_facts(run_folder) if isinstance(model, Model) else None
    if facts is not None and facts.generation is not None:
        write_json(folder / GENERATION_FILE, facts.generation)


def _check_outside(folder: Path, run: Path) -> None:
    """Rejects the run's own folder, those that hold it, and its checkpoints; another folder inside is welcome.

    A link is looked at by its own place and by the one that it leads to.
    """
    for place, home in ((absolute(folder), run), (folder.resolve(), run.resolve())):
        if home.is_relative_to(place) or place.is_relative_to(home / CHECKPOINTS):
            what = "holds the run itself" if home.is_relative_to(place) else "is where the run keeps its checkpoints"
            raise CheckpointError(f"{folder} {what}. Choose another folder, such as {run / 'exports' / 'hf'}.")
