"""`trainwright new DIR`: writes a small working project, one short commented file for each part of a training.

The files are in templates/, copied as they are: each folder there is a project of its own, which tests train.
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
    """The projects that there are: the folders of templates/."""

    LM = "lm"
    CLASSIFIER = "classifier"
    CUSTOM = "custom"


WHAT = {
    Kind.LM: "a small language model of Python code",
    Kind.CLASSIFIER: "a small classifier of points on spirals",
    Kind.CUSTOM: "a small network with every part of its training changed",
}
SHOWN_FILES = 4  # a folder with more names the first few


def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write it to.", show_default=False)],
    kind: Annotated[
        Kind, typer.Option(help="lm: a language model; classifier: labels; custom: every part changed, to learn from.")
    ] = Kind.CLASSIFIER,
) -> None:
    """Write a small project that trains at once: trainer, model, optimizer, collator, hook, run.yaml and a test."""
    _reject_taken(folder)
    template = template_folder(kind)
    files = sorted(path.relative_to(template) for path in template.rglob("*") if _belongs(path))
    files.sort(key=lambda file: file.name != "run.yaml")  # first what names all the others
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
    """Return where the files of a project lie in the package."""
    return Path(str(importlib.resources.files("trainwright"))) / "templates" / kind.value


def _reject_taken(folder: Path) -> None:
    if folder.is_dir():
        there = sorted(path.name for path in folder.iterdir())
        if there:
            more = f" and {len(there) - SHOWN_FILES} more" if len(there) > SHOWN_FILES else ""
            raise ConfigError(
                f"{folder} is not empty: it holds {', '.join(there[:SHOWN_FILES])}{more}. Nothing was written. "
                "Name a folder that does not exist yet, or an empty one."
            )
    elif os.path.lexists(folder):
        raise ConfigError(f"{folder} is there already and is not a folder. Nothing was written. Name another one.")


def _write(template: Path, files: list[Path], folder: Path) -> None:
    try:
        for file in files:
            target = folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            # Only the text: the package's files may be read-only, the project's are to be changed.
            shutil.copyfile(template / file, target)
    except OSError as error:
        raise ConfigError(
            f"{error.filename2 or error.filename or folder} cannot be written: {error.strerror}. "
            "Name a folder where you may write, or make room."
        ) from error


def _belongs(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"


def _summary(path: Path) -> str:
    """Return what a file's first line says of it; a name that the line begins with is left out."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if path.suffix == ".py":
        words = first.strip('"').partition(": ")[2]
    elif path.suffix == ".yaml":
        words = first.removeprefix("# ").partition(": ")[2]
    else:
        return ""
    return words.partition(". ")[0].partition("; ")[0].rstrip(".")
