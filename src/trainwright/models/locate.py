"""Finds the folder of a pretrained model by its name: on this machine first, then on the hub if it answers."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from trainwright.errors import CheckpointError
from trainwright.models.pretrained import CONFIG_FILE

HOME_VARIABLE = "TRAINWRIGHT_HOME"
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WANTED_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.txt")
"""What is brought from the hub: no pickles and no weights of other frameworks."""


def find_folder(name_or_folder: str | Path, *, home_path: str | Path | None = None) -> Path:
    """Returns the folder of a model: the one that is named, or the one in which a name is kept on this machine.

    A name (`org/name`) is looked for in `home_path`, or without one in $TRAINWRIGHT_HOME
    (default ~/.cache/trainwright/models) and in Hugging Face's cache; then the hub is asked.
    """
    given = Path(name_or_folder).expanduser()
    if given.is_dir():
        return given
    if given.is_file():
        raise CheckpointError(f"{given} is a file. Give the folder that holds a model's {CONFIG_FILE} and weights.")
    homes = home_folders() if home_path is None else [Path(home_path).expanduser()]
    name = str(name_or_folder)
    if HUB_NAME.fullmatch(name):
        for home in homes:
            found = _in_home(home, name)
            if found is not None:
                return found
        return _from_hub(name, homes)
    raise CheckpointError(f"There is no folder {given}, and {name!r} is no name of a model (org/name).")


def home_folders() -> list[Path]:
    """Returns the folders in which models are looked for by name, first one first."""
    own = os.environ.get(HOME_VARIABLE)
    cache = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    return [
        Path(own).expanduser() if own else Path("~/.cache/trainwright/models").expanduser(),
        Path(os.environ.get("HF_HUB_CACHE") or cache / "hub"),
    ]


def _in_home(home: Path, name: str) -> Path | None:
    """Looks for home/name, and for a snapshot in the layout of Hugging Face's cache."""
    if (home / name / CONFIG_FILE).is_file():
        return home / name
    repository = home / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if reference.is_file():
        snapshot = repository / "snapshots" / reference.read_text("utf-8").strip()
        if (snapshot / CONFIG_FILE).is_file():
            return snapshot
    return None


def _from_hub(name: str, homes: list[Path]) -> Path:
    looked = f"There is no folder {name}, and no model of that name in {' or '.join(str(home) for home in homes)}"
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{looked}. To ask the hub, install `pip install 'trainwright[huggingface_hub]'`.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED_FILES)))
    except Exception as error:  # its errors are many: no network, no such name, no permission, no disk
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given").rstrip(".")
        raise CheckpointError(f"{looked}, and the hub did not give it: {type(error).__name__}: {first}.") from error
