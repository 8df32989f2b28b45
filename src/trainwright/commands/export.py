"""`trainwright export RUN --to FOLDER`: writes the model of a run as files that others read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class ExportFormat(StrEnum):
    """The layouts of files that a model can be written in."""

    huggingface = "huggingface"
    safetensors = "safetensors"


class Precision(StrEnum):
    """What weights can be rounded to."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def export(
    run: Annotated[Path, typer.Argument(help="The run's folder, or one of its checkpoints.", show_default=False)],
    to: Annotated[Path, typer.Option(help="The folder to write.", show_default=False)],
    step: Annotated[str, typer.Option(help="Which checkpoint: latest, best, or a number.")] = "latest",
    file_format: Annotated[
        ExportFormat, typer.Option("--format", help="huggingface: for transformers; safetensors: plain weights.")
    ] = ExportFormat.huggingface,
    dtype: Annotated[
        Precision | None, typer.Option(help="Round the weights to this.", show_default="as they are")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of the same names in a folder that is no earlier export.")
    ] = False,
) -> None:
    """Write the model of a run into a folder: in Hugging Face's layout, or as plain safetensors.

    An earlier export is replaced; files that you have put beside it are kept.
    """
    from trainwright.export.huggingface import export_run

    written = export_run(
        run, to, step=step, file_format=file_format.value, dtype=dtype and dtype.value, overwrite=overwrite
    )
    print(written)
