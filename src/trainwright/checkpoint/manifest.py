"""MANIFEST.json, which makes a folder a checkpoint: the size and hash of each file, and the metrics.

store.py and remote_store.py write, verify and delete checkpoints. This module does not import torch, so that
`trainwright runs` starts fast.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.errors import CheckpointError

FORMAT = 1
MANIFEST = "MANIFEST.json"
STEP_NAME = re.compile(r"step-(\d{8,})")


class UnknownFormatError(CheckpointError):
    """A manifest is intact, but this version of trainwright does not support its format."""


class UnreachableError(CheckpointError):
    """A remote folder did not answer, or denied access. The contents are unknown."""


@dataclass(frozen=True)
class FileFact:
    """The manifest's record of a file."""

    size: int
    """Bytes."""
    sha256: str
    """The hash of the content in hex."""
    pieces: str = ""
    """For tensors: the hashes of the file's chunks in order, so that a reader can verify the chunks that it reads."""

    def check(self, *, where: object, size: int | None = None, sha256: str | None = None) -> None:
        """Raises if the size or the hash of the file at `where` differs; None: not known, not compared."""
        if size is not None and size != self.size:
            raise CheckpointError(f"The file has {size} bytes instead of {self.size}.", where=where)
        if sha256 is not None and sha256 != self.sha256:
            problem = f"The content differs: sha256 {sha256[:12]}… instead of {self.sha256[:12]}…"
            raise CheckpointError(f"{problem}.", where=where)


def make_manifest(*, step: int, parts: list[str], files: Mapping[str, FileFact], metrics: Mapping[str, float]) -> bytes:
    """Returns the bytes of the manifest of a new checkpoint."""
    return render_manifest(
        {
            "format": FORMAT,
            "step": step,
            "created": datetime.now(UTC).isoformat(),
            # JSON has no nan and inf; both are null, which is read as nan.
            "metrics": {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()},
            "parts": parts,
            "files": {
                name: {key: value for key, value in asdict(fact).items() if value != ""} for name, fact in files.items()
            },
        }
    )


def render_manifest(content: Mapping[str, Any]) -> bytes:
    """Returns the manifest's bytes, including a hash of the content, because a flipped bit in a metric is damage
    too."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": own}, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the entries of the manifest in `folder`: format, step, created, metrics, parts, files; raises damage."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The manifest cannot be read: {error}.", where=path) from error
    return parse_manifest(raw, where=path)


def parse_manifest(raw: bytes, *, where: object) -> dict[str, Any]:
    """Returns the entries of the manifest with these bytes; `where` is the file that an error names."""
    try:
        content = json.loads(raw)
        content.pop("sha256")
        # Rendering the content again must produce the same bytes; this covers the hash and the whitespace.
        matches = render_manifest(content) == raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The manifest is damaged: {error!r}.", where=where) from error
    if not matches:
        raise CheckpointError("The manifest is damaged: it does not match its own hash.", where=where)
    if content.get("format") != FORMAT:
        problem = f"The format is {content.get('format')}; this trainwright reads {FORMAT}"
        raise UnknownFormatError(f"{problem}. Use the trainwright that wrote it.", where=where)
    if not _has_valid_entries(content):
        raise CheckpointError("The manifest is damaged: an entry is missing or has another type.", where=where)
    metrics = {name: math.nan if value is None else value for name, value in content["metrics"].items()}
    return {**content, "metrics": metrics}


def check_manifest_step(manifest: Mapping[str, Any], step: int, *, where: object) -> None:
    """Raises if the manifest in the folder of `step` belongs to another step."""
    if manifest["step"] != step:
        problem = f"The manifest is of step {manifest['step']}, but the folder is named for step {step}"
        raise CheckpointError(f"{problem}. Rename the folder back.", where=where)


def _has_valid_entries(content: Mapping[str, Any]) -> bool:
    """Returns True if every entry exists with its type; anyone can write a manifest with a valid hash."""
    try:
        # A file must be in this folder; "../x" and "/x" would read other files.
        files = all(
            "/" not in name
            and name not in ("", ".", "..")
            and {"size", "sha256"} <= facts.keys() <= {"size", "sha256", "pieces"}
            and isinstance(facts["size"], int)
            and isinstance(facts["sha256"], str)
            and isinstance(facts.get("pieces", ""), str)
            for name, facts in content["files"].items()
        )
        numbers = all(isinstance(value, int | float | None) for value in content["metrics"].values())
        names = isinstance(content["parts"], list) and all(isinstance(part, str) for part in content["parts"])
        return files and numbers and names and isinstance(content["step"], int) and isinstance(content["created"], str)
    except (KeyError, TypeError, AttributeError):
        return False
