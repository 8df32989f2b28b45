"""Hugging Face's library `datasets`: how it is imported, and whether it may use the network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainwright.errors import DataError


def import_datasets(who: str) -> Any:
    """Returns the library, or says how to get it; `who` needs it."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{who} needs the library `datasets`, which is not installed. "
            "Install it: pip install 'trainwright[datasets]'."
        ) from error
    if not hasattr(datasets, "load_dataset"):
        raise DataError(
            f"`import datasets` finds {getattr(datasets, '__path__', datasets)} instead of Hugging Face's library. "
            "Rename that folder, or install the library: pip install 'trainwright[datasets]'."
        )
    return datasets


@contextmanager
def network_use(*, offline: bool | None) -> Iterator[None]:
    """Forbids or allows the hub while the block runs; None leaves it to HF_HUB_OFFLINE.

    The libraries read their environment only when imported, but these settings at each request.
    """
    if offline is None:
        yield
        return
    from datasets import config
    from huggingface_hub import constants

    before = config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = offline
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def fingerprint_rows(dataset: Any) -> str:
    """Returns what a `datasets.Dataset` knows its rows by, and the types that it reads them as."""
    return f"{dataset._fingerprint} {list(dataset.features.items())}"
