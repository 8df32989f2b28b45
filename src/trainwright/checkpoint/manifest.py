"""MANIFEST.json: what makes a folder a checkpoint, with the size and hash of each of its files and its metrics.

How a checkpoint is written, verified and deleted is store.py's. Imports no torch, so that `trainwright runs`
answers at once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.errors import CheckpointError

FORMAT = 1
MANIFEST = "MANIFEST.json"
STEP_NAME = re.compile(r"step-(\d{8,})")


class UnknownFormatError(CheckpointError):
    """A manifest is whole, but of a format that this trainwright does not read."""


def render_manifest(content: Mapping[str, Any]) -> bytes:
    """Return the manifest's bytes, with a hash of its own: a flipped bit in a metric is damage too."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": own}, indent=2) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what the manifest in `folder` says: format, step, created, metrics, parts, files; or say its damage."""
    path = folder / MANIFEST
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The manifest cannot be read: {error}.", where=path) from error
    return parse_manifest(raw, where=path)


def parse_manifest(raw: bytes, *, where: object) -> dict[str, Any]:
    """Return what the manifest with these bytes says; `where` is the file that an error names."""
    try:
        content = json.loads(raw)
        content.pop("sha256")
        # Written anew from its content it must give the same bytes; this covers the hash and every blank between.
        fits = render_manifest(content) == raw
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"The manifest is damaged: {error!r}.", where=where) from error
    if not fits:
        raise CheckpointError("The manifest is damaged: it does not fit its own hash.", where=where)
    if content.get("format") != FORMAT:
        problem = f"The format is {content.get('format')}; this trainwright reads {FORMAT}"
        raise UnknownFormatError(f"{problem}. Use the trainwright that wrote it.", where=where)
    if not _has_its_shape(content):
        raise CheckpointError("The manifest is damaged: an entry is missing or of another kind.", where=where)
    return dict(content)


def _has_its_shape(content: Mapping[str, Any]) -> bool:
    """Say whether every entry is there and what readers take it for; its own hash anybody can write."""
    try:
        files = content["files"].items()
        # A name is one of this folder: "../x" and "/x" would have other people's files read.
        whole = all(
            "/" not in name
            and name not in ("", ".", "..")
            and facts.keys() == {"size", "sha256"}
            and isinstance(facts["size"], int)
            and isinstance(facts["sha256"], str)
            for name, facts in files
        )
        numbers = all(isinstance(value, int | float) for value in content["metrics"].values())
        names = isinstance(content["parts"], list) and all(isinstance(part, str) for part in content["parts"])
        return whole and numbers and names and isinstance(content["step"], int) and isinstance(content["created"], str)
    except (KeyError, TypeError, AttributeError):
        return False
