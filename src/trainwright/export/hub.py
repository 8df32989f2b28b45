"""Uploads an export to the Hugging Face hub, without asking anything."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainwright.errors import CheckpointError, ConfigError
from trainwright.export.load import earlier_files

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def check_hub(repository: str) -> None:
    """Rejects a name that is not owner/name, and a missing package or token, before anything is exported."""
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigError(f'--push: "{repository}" is not the name of a repository. Use owner/name.')
    try:
        from huggingface_hub import get_token
    except ImportError as error:
        raise ConfigError(
            "--push needs huggingface_hub, which is not installed. Install it: pip install "
            "'trainwright[huggingface_hub]'."
        ) from error
    if not get_token():
        raise ConfigError(
            "--push: there is no token of the Hugging Face hub. Log in once with `hf auth login`, or set the variable "
            "HF_TOKEN to a token that may write (huggingface.co/settings/tokens)."
        )


def push_export(folder: Path, repository: str, *, is_public: bool = False) -> str:
    """Uploads the files of an export to a repository of models, and returns its address.

    A missing repository is created, private unless `is_public`; an existing one keeps its visibility. Files of the
    folder that are not part of the export stay here.
    """
    check_hub(repository)
    from huggingface_hub import HfApi

    files = earlier_files(folder)
    if not files:
        raise CheckpointError(f"{folder} is not an export. Export the run first.")
    api: Any = HfApi()
    try:
        address = api.create_repo(repository, repo_type="model", private=not is_public, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            repo_type="model",
            folder_path=folder,
            allow_patterns=sorted(re.sub(r"([*?\[])", r"[\1]", name) for name in files),
            commit_message="Upload the export of a run",
        )
    except Exception as error:  # of the network, of the hub, and of the rights of the token
        raise CheckpointError(
            f"The export is complete in {folder}, but was not pushed to {repository}: {type(error).__name__}: {error}"
        ) from error
    return str(address)
