"""`trainwright estimate run.yaml --world 64`: predicts memory per rank and disk per checkpoint, without a device."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated

import typer

from trainwright.commands.shard import Length, Rank, World, describe_batch, describe_ranks
from trainwright.commands.terminal import (
    AsJson,
    Overrides,
    RunPath,
    Trust,
    load_run,
    show_rows,
    shown_in_terminal,
    size_text,
)
from trainwright.config import RunConfig
from trainwright.errors import ConfigError

if TYPE_CHECKING:
    from trainwright.analysis.estimate import Estimate

UNITS = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def estimate(
    run: RunPath,
    overrides: Overrides = None,
    world: World = 1,
    rank: Rank = 0,
    length: Length = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="The memory of a device, such as 80GB: shows whether the run fits.")
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Predict, without a device, the memory that one rank needs and the size of a checkpoint.

    Builds the run on fake ranks, runs two steps on fake tensors and counts their memory. Exits with 1 if --memory is
    given and the run does not fit.
    """
    config = load_run(run, overrides, trust=trust)
    limit = None if memory is None else read_size(memory)
    with shown_in_terminal("Building the run on fake ranks"):
        from trainwright.analysis.estimate import estimate as estimate_run

        found = estimate_run(config, world_size=world, rank=rank, sequence_length=length)
    if as_json:
        fitting = {} if limit is None else {"memory_bytes": limit, "fits": found.fits(limit)}
        print(json.dumps(found.to_dict() | fitting, indent=2))
    else:
        _show(found, limit)
        if limit is not None and not found.fits(limit):
            print(f"To try: {what_to_try(config, found.axes)}.")
    if limit is not None and not found.fits(limit):
        raise typer.Exit(1)


def read_size(text: str) -> int:
    """Returns the number of bytes of a text such as 80GB or 80 GiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b)\s*", text.lower())
    if found is None:
        raise ConfigError(f"--memory: {text!r} is not a size. Use a number with a unit, such as 80GB or 80GiB.")
    return int(float(found[1]) * UNITS[found[2]])


def what_to_try(config: RunConfig, axes: dict[str, int]) -> str:
    """Returns settings that reduce the memory and that the run does not use yet."""
    from trainwright.analysis.fake_ranks import planned_precision
    from trainwright.build.parallelize import gather_dtype

    found = []
    if config.model is not None and "activation_checkpointing" not in config.model.reserved:
        found.append("recompute layers (model.activation_checkpointing)")
    elif config.model is not None:
        if "offload" not in config.model.reserved and not config.runtime.device.startswith("cpu"):
            found.append("keep the inputs of blocks on the host (model.offload)")
        if "tile" not in config.model.reserved:
            found.append("run the MLP in tiles of tokens (model.tile)")
    if axes.get("replicate", 1) > 1 and axes.get("fsdp", 1) == 1:
        found.append("shard the model instead of replicating it (runtime.mesh: {fsdp: -1})")
    else:
        found.append("more data ranks (--world, with runtime.mesh: {fsdp: -1})")
    has_default = gather_dtype(planned_precision(config)) is not None
    if has_default and config.runtime.gather_precision == "fp32" and axes.get("fsdp", 1) > 1:
        found.append("gather weights as bf16 (remove runtime.gather_precision)")
    optimizer = config.trainer.optimizer
    if (
        optimizer is not None
        and optimizer.type == "adamw"
        and not {"state", "state_dtype"} & optimizer.arguments.keys()
    ):
        found.append("keep moments in 8 bits (trainer.optimizer.state: 8bit)")
    if axes.get("tensor", 1) == 1:
        found.append("shard layers too (runtime.mesh.tensor, within one machine)")
    return "; ".join(found)


def _show(found: Estimate, limit: int | None) -> None:
    print(f"{describe_ranks(found.world_size, found.axes)}; {found.num_parameters:,} parameters")
    batch = describe_batch(found.batch_shapes, found.micro_batch_size, found.gradient_accumulation_steps)
    print(f"Rank {found.rank}, in a step of {batch}:\n")
    kinds = [kind for kind, size in found.most.items() if size or found.at_peak[kind]]
    rows = [(kind, size_text(found.most[kind]), size_text(found.at_peak[kind])) for kind in kinds]
    show_rows(("held", "at most", "at the peak"), [*rows, ("total", "", size_text(found.peak_bytes))])
    print(f"\nA checkpoint takes {size_text(found.checkpoint_bytes)} on disk, of all ranks together.")
    for remark in found.remarks:
        print(remark)
    if limit is not None:
        fits = f"fits {size_text(limit)}, with {size_text(limit - found.peak_bytes)} left"
        fails = f"does not fit {size_text(limit)} (5 % of it is kept free for memory that is not counted)"
        samples = found.largest_micro_batch(limit)
        words = f"{fits if found.fits(limit) else fails}. The largest micro-batch that would fit"
        print(f"It {words} has about {samples} samples of this shape.")
