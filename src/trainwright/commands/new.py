"""`trainwright new DIR`: writes a small working project, with one short commented file for each component.

It copies one of the folders in templates/, which tests train.
"""

from __future__ import annotations

import importlib.resources
import os
import shlex
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import ConfigError


class Kind(StrEnum):
    """The projects, which are the folders of templates/."""

    LM = "lm"
    CLASSIFIER = "classifier"
    CUSTOM = "custom"


WHAT = {
    Kind.LM: "a small language model of Python code",
    Kind.CLASSIFIER: "a small classifier of points on spirals",
    Kind.CUSTOM: "a small network with every part of its training changed",
}
_MAX_NAMES = 4


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the project.", show_default=False)],
    kind: Annotated[
        Kind, typer.Option(help="lm: a language model; classifier: labels; custom: every part changed, to learn from.")
    ] = Kind.CLASSIFIER,
) -> None:
    """Write a small project that trains at once: trainer, model, optimizer, collator, hook, run.yaml and a test."""
    _reject_existing(folder)
    template = template_folder(kind)
    paths = [path for path in template.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    files = sorted(path.relative_to(template) for path in paths)
    files.sort(key=lambda file: file.name != "run.yaml")  # first the file that names the others
    _write(template, files, folder)
    print(f"Wrote {WHAT[kind]} to {folder}:")
    for file in files:
        summary = _summary(template / file)
        if summary:
            print(f"  {file.as_posix():<32}{summary}")
    print("\nNext:")
    if folder.resolve() != Path.cwd():
        print(f"  cd {shlex.quote(str(folder))}")
    print("  trainwright train run.yaml      # trains in seconds; again: continues, or says that it is done")
    print("  trainwright explain run.yaml    # the loop as it runs, with these files in it")
    print("  python -m pytest                # the project's own test (pip install pytest)")


def template_folder(kind: Kind) -> Path:
    """Returns the folder of a project's files in the package."""
    return Path(str(importlib.resources.files("trainwright"))) / "templates" / kind.value


def _reject_existing(folder: Path) -> None:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if names:
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        raise ConfigError(
            f"{folder} is not empty: it has {', '.join(names[:_MAX_NAMES])}{more}. Nothing was written. Use a folder "
            "that does not exist, or an empty one."
        )
    if not folder.is_dir() and os.path.lexists(folder):
        raise ConfigError(f"{folder} exists and is not a folder. Nothing was written. Use another name.")


def _write(template: Path, files: list[Path], folder: Path) -> None:
    try:
        for file in files:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            # Without the mode, because files of the package may be read-only.
            shutil.copyfile(template / file, target)
    except OSError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename or folder} cannot be written: {error.strerror}. "
            "Use a folder with write access and enough space."
        ) from error


def _summary(path: Path) -> str:
    """Returns the first line of a Python or YAML file, without the name that it begins with."""
    if path.suffix not in (".py", ".yaml"):
        return ""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    text = first.removeprefix("# ").strip('"').partition(": ")[2]
    return text.partition(". ")[0].partition("; ")[0].rstrip(".")
