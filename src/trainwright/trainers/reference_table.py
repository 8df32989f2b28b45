"""Precomputed log-probabilities of the answers of all samples under the first model, kept in the run folder.

A sample is identified by `row_id`, a hash of its tokens that the collator adds, so the table does not depend on the
order and the split of the data. dpo.py computes the values before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from trainwright.errors import CheckpointError, DataError

TABLE_FILE = "reference_log_probs.safetensors"


@dataclass(frozen=True)
class ReferenceTable:
    """Sorted hashes of samples [rows], and the log-probabilities of their answers [rows, 2], float32."""

    row_ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]

    @classmethod
    def collect(cls, parts: Iterable[tuple[Tensor, Tensor]]) -> ReferenceTable:
        """Returns the table of batches of hashes and log-probabilities, in which a sample may occur several times."""
        row_ids, log_probs = (torch.cat(each).numpy(force=True) for each in zip(*parts, strict=True))
        found, first = np.unique(row_ids, return_index=True)
        return cls(found, log_probs[first].astype(np.float32))

    @classmethod
    def load(cls, folder: Path) -> ReferenceTable | None:
        """Returns the table of a run folder; None without one."""
        path = folder / TABLE_FILE
        try:
            content = load_file(path)
            return cls(content["row_ids"], content["log_probs"])
        except FileNotFoundError:
            return None
        except (OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                "The precomputed log-probabilities of the reference are damaged. Restore the file, or start over with "
                f"--fresh: {error}",
                where=path,
            ) from error

    def save(self, folder: Path) -> None:
        """Writes the table into a run folder, atomically."""
        staging = folder / f".{TABLE_FILE}.writing"
        save_file({"row_ids": self.row_ids, "log_probs": self.log_probs}, staging)
        staging.replace(folder / TABLE_FILE)

    def add_to(self, batch: Any) -> Any:
        """Returns a batch in host memory with the log-probabilities of its samples."""
        wanted = batch["row_id"].numpy()
        rows = np.searchsorted(self.row_ids, wanted).clip(max=len(self.row_ids) - 1)
        missing = self.row_ids[rows] != wanted
        if missing.any():
            raise DataError(
                f"{int(missing.sum())} of {len(wanted)} samples of a batch have no precomputed log-probability of the "
                "reference: the data or its tokenizer has changed since the run began, or data.process changes the "
                "samples. Restore the data, start over with --fresh, or set trainer.precompute_reference: false."
            )
        return {**batch, "reference_log_probs": torch.from_numpy(self.log_probs[rows])}
