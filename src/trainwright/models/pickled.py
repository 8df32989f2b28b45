"""The one place where a pickle is read: weights of a folder that has no safetensors, when the user allows it."""

from __future__ import annotations

from pathlib import Path
from zipfile import is_zipfile

import torch
from torch import Tensor

from trainwright.errors import CheckpointError


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a `pytorch_model.bin`; anything in it that is no tensor makes it refused.

    `weights_only` builds nothing but tensors and plain containers, so that a prepared file cannot run a program.
    Files from before torch 1.6 are no zip archives and cannot be mapped: they are read whole.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # damaged files raise errors of many kinds
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a mapping of names to tensors.")
    return content
