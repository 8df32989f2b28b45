"""`trainwright export RUN --to FOLDER`: writes the model of a run in a published file layout."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainwright.commands.terminal import CheckpointStep, Trust, Weights, named_run
from trainwright.errors import ConfigError

ExportFormat = StrEnum("ExportFormat", ["huggingface", "safetensors"])
WeightDtype = StrEnum("WeightDtype", ["bf16", "fp16", "fp32"])


def export(
    run: Annotated[
        Path,
        typer.Argument(
            help="The run's folder or name, or one of its checkpoints.", show_default=False, callback=named_run
        ),
    ],
    to: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    step: CheckpointStep = "latest",
    weights: Weights = None,
    file_format: Annotated[
        ExportFormat, typer.Option("--format", help="huggingface: for transformers; safetensors: plain weights.")
    ] = ExportFormat.huggingface,
    dtype: Annotated[
        WeightDtype | None, typer.Option(help="Round the weights to this.", show_default="as they are")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files in a folder that is not an earlier export.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            help="Upload the folder to this repository of the Hugging Face hub: owner/name.", show_default="no"
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: a new repository is public instead of private.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Write the model of a run into a folder: in Hugging Face's layout, or as plain safetensors.

    README.md is a model card. An earlier export is replaced; other files in the folder are kept.
    """
    from trainwright.export.huggingface import check_hub, export_run, push_export

    if push is not None:
        check_hub(push)
    elif public:
        raise ConfigError("--public has no effect without --push owner/name.")
    precision = None if dtype is None else dtype.value
    written = export_run(
        run,
        to,
        step=step,
        weights=weights,
        file_format=file_format.value,
        dtype=precision,
        overwrite=overwrite,
        trust=trust,
    )
    print(written)
    if push is not None:
        print(push_export(written, push, is_public=public))
