"""A config from Python code with files and overrides laid over it: what an experiment's name stands for.

    code (a RunConfig or a dict)  <  config files, later ones last  <  overrides

Each setting remembers where it was written, the code's own at the place of that code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainwright.config import yaml_text
from trainwright.config.files import Document, lay_over, resolve_document
from trainwright.config.python_files import as_settings
from trainwright.config.schema import RunConfig
from trainwright.config.tree import Node, Origin, merge, plant


def layered_config(
    made: Any,
    *,
    name: str,
    folder: Path,
    where: Origin,
    files: Iterable[str | os.PathLike[str]] = (),
    overrides: Iterable[str] = (),
) -> RunConfig:
    """Return what code at `where` has made, a RunConfig or a mapping, with files and overrides over it.

    `name` is for a run that gives none, and `folder` is where relative files start, unless the RunConfig has its own.
    Overrides are `a.b=value`, or YAML mappings, which are laid over before those.
    """
    known = made._origins if isinstance(made, RunConfig) else {}  # those of the files that it was loaded from
    settings = merge(plant({"name": name}, {}), plant(as_settings(made, {(): where}), {(): where, **known}))
    document, single = lay_over(resolve_document(settings, folder), files), []
    for text in overrides:
        if text.lstrip().startswith("{"):
            document = Document(merge(document.settings, _mapping(text)), document.project_dir)
        else:
            single.append(text)
    return RunConfig._assemble(document, single)


def _mapping(text: str) -> Node:
    where = Origin(f"override {text}", 0)
    return yaml_text.parse(text, lambda line: where)
