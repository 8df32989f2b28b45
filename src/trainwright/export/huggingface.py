"""Writes the model of a run as a folder that others read: in Hugging Face's layout, or as plain safetensors.

Loading the checkpoint is load.py's; the files' layout is models/saving.py's; the tokenizer is tokenizers.py's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.folder import find_run, read_config
from trainwright.errors import CheckpointError, ConfigError, TrainwrightError
from trainwright.export.load import load_checkpoint
from trainwright.export.tokenizers import find_tokenizer, save_tokenizer
from trainwright.models.key_map import KeyMap
from trainwright.models.lora import merge_lora
from trainwright.models.model import Model
from trainwright.models.pretrained import as_dtype
from trainwright.models.saving import SETTINGS_FILE, staged, write_weights

logger = logging.getLogger(__name__)

FORMATS = ("huggingface", "safetensors")
MAX_SHARD_BYTES = 5_000_000_000


def export_run(
    run: str | Path,
    folder: str | Path,
    *,
    step: int | str = "latest",
    file_format: str = "huggingface",
    dtype: torch.dtype | str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Writes the model of a run, as it was at a step, into a folder, with the run's tokenizer; returns the folder.

    "huggingface" is what transformers and AutoModel read; "safetensors" is any model's weights under their own names,
    with the run's settings beside them. Adapters are merged into the weights. `dtype` (bf16, fp16, fp32) rounds them.
    """
    if file_format not in FORMATS:
        raise ConfigError(f"There is no format {file_format!r}. Use one of: {', '.join(FORMATS)}.", where="format")
    wanted = as_dtype(dtype)
    folder, run_folder = Path(folder), find_run(Path(run))[0]
    _check_outside(folder, run_folder)
    with staged(folder) as staging:
        model = load_checkpoint(run, step)
        merge_lora(model)
        if wanted is not None:
            model = model.to(wanted)
        if file_format == "huggingface":
            write_hugging_face(model, staging, max_shard_bytes=max_shard_bytes)
        else:
            write_weights(model, staging, key_map=KeyMap(), max_shard_bytes=max_shard_bytes)
            shutil.copyfile(run_folder / SETTINGS_FILE, staging / SETTINGS_FILE)
        _add_tokenizer(run_folder, staging)
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
    with contextlib.redirect_stdout(sys.stderr):  # its progress bars are not what was asked for
        save(folder, max_shard_size=max_shard_bytes)


def _add_tokenizer(run_folder: Path, folder: Path) -> None:
    """Saves the tokenizer of the run's data; weights are worth having without it, so a failure is only told."""
    try:
        config = read_config(run_folder)
        tokenizer = None if config is None else find_tokenizer(config)
        if tokenizer is not None:
            save_tokenizer(tokenizer, folder)
    except (TrainwrightError, OSError) as error:
        logger.warning("The run's tokenizer is not in the export: %s", error)


def _check_outside(folder: Path, run: Path) -> None:
    """Refuses the run's own folder and those that hold it; a new folder inside of the run is welcome."""
    place = os.path.abspath(folder)  # noqa: PTH100  # resolve() would follow links
    if os.path.commonpath([place, run]) == place:
        raise CheckpointError(
            f"{folder} holds the run itself. Choose another folder, such as {run / 'exports' / 'hf'}."
        )
