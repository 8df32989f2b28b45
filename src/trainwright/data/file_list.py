"""The files that a dataset reads, and the check that a resumed run reads the same files.

Positions in the data refer to these files in their order. Their contents are not compared.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.errors import DataError

logger = logging.getLogger(__name__)

_MAX_LISTED = 1000  # of a longer list only a digest is saved
_MAX_SHOWN = 4
_MAX_DEPTH = 8


def files_of(dataset: Any, *, depth: int = 0) -> list[str]:
    """Returns the files of a dataset and of those inside it, `name (size)` in order; [] if it does not name any.

    A dataset names them with a method `list_files`. Mixed, packed and split datasets contain other datasets.
    """
    listed = getattr(dataset, "list_files", None)
    if callable(listed):
        return list(listed())
    inside = vars(dataset) if hasattr(dataset, "__dict__") else {}
    sources = inside.get("sources")
    named = list(sources.items()) if isinstance(sources, Mapping) else []
    named += [("", inside[name]) for name in ("source", "dataset") if name in inside]
    if depth == _MAX_DEPTH:
        return []
    return [f"{name}: {file}" if name else file for name, source in named for file in files_of(source, depth=depth + 1)]


def saved_files(dataset: Any) -> list[str]:
    """Returns the list for a checkpoint: of many files one line with their number and a digest."""
    files = files_of(dataset)
    if len(files) <= _MAX_LISTED:
        return files
    return [f"{len(files):,} files with the digest {hashlib.sha256(chr(10).join(files).encode()).hexdigest()[:16]}"]


def reject_changed_files(saved: Sequence[str], files: Sequence[str], *, accept_changes: bool) -> None:
    """Raises if the files of the training data are not those of the checkpoint; with `accept_changes` warns instead."""
    if list(saved) == list(files):
        return
    problem = f"data.train reads other files than the checkpoint was saved with: {_describe_changes(saved, files)}"
    if not accept_changes:
        raise DataError(
            f"{problem}. Its position refers to the files as they were. Restore them, start over with --fresh, or "
            "continue with --accept-changes, which may repeat or omit samples."
        )
    logger.warning("%s: samples of this epoch may be repeated or omitted.", problem)


def _describe_changes(saved: Sequence[str], files: Sequence[str]) -> str:
    before, now = (dict(each.rpartition(" (")[::2] for each in listed) for listed in (saved, files))
    kinds = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "another size": [name for name in now if name in before and now[name] != before[name]],
    }
    if not any(kinds.values()):
        first = next(number for number, pair in enumerate(zip(saved, files, strict=False)) if pair[0] != pair[1])
        return f"another order, {files[first]} where {saved[first]} was"
    return "; ".join(f"{kind}: {_shown(names)}" for kind, names in kinds.items() if names)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN:,} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more
