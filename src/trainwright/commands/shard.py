"""`trainwright shard run.yaml --world 64`: shows the shards of one rank, and the collectives of a step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

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

if TYPE_CHECKING:
    from trainwright.analysis.shard import Sharding

World = Annotated[int, typer.Option("--world", min=1, help="The number of ranks: processes, one per device.")]
Rank = Annotated[int, typer.Option("--rank", min=0, help="The rank to show.")]
Length = Annotated[
    int | None,
    typer.Option("--length", min=1, help="Use rows of this many tokens as samples instead of reading the data."),
]


def shard(
    run: RunPath,
    overrides: Overrides = None,
    world: World = 1,
    rank: Rank = 0,
    length: Length = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show each layer's parameters, not those of equal layers as one.")
    ] = False,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Show the parameters of each rank and the communication of one step, without devices.

    Builds the run on fake ranks and runs one step on fake tensors.
    """
    config = load_run(run, overrides, trust=trust)
    with shown_in_terminal("Building the run on fake ranks"):
        from trainwright.analysis.shard import plan_shards

        found = plan_shards(config, world_size=world, rank=rank, sequence_length=length)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found, shows_all=every)


def describe_ranks(world_size: int, axes: dict[str, int]) -> str:
    """Returns the number of ranks and the mesh axes: 64 ranks = fsdp 8 × tensor 8."""
    if world_size == 1:
        return "1 rank"
    return f"{world_size} ranks = {' × '.join(f'{axis} {size}' for axis, size in axes.items())}"


def describe_batch(shapes: dict[str, list[int]], micro_batch_size: int, gradient_accumulation_steps: int) -> str:
    """Returns the inputs of one step of a rank."""
    tensors = ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in shapes.items())
    number = gradient_accumulation_steps
    micro_batches = f"{number} micro-batches" if number > 1 else "one micro-batch"
    return f"{micro_batches} of {micro_batch_size} ({tensors})"


def _show(found: Sharding, *, shows_all: bool) -> None:
    from trainwright.analysis.shard import grouped

    copies = f"rank {found.rank} holds {size_text(found.rank_bytes)} of {size_text(found.num_bytes)}"
    print(f"{describe_ranks(found.world_size, found.axes)}; {found.num_parameters:,} parameters: {copies}\n")
    rows = [
        (
            each.name,
            f"{each.count} ×" if each.count > 1 else "",
            " × ".join(map(str, each.shape)),
            f"[{', '.join(each.axes)}]",
            " × ".join(map(str, each.local_shape)),
            size_text(each.num_bytes * each.count),
            each.dtype if each.is_trained else f"{each.dtype}, frozen",
        )
        for each in (found.layouts if shows_all else grouped(found.layouts))
    ]
    show_rows(("parameter", "", "whole", "split along", "on this rank", "bytes", "type"), rows)
    for title, names in (
        ("These sharding rules match nothing:", found.unmatched),
        ("No sharding rule covers these parameters, which are copied along tensor:", found.uncovered),
    ):
        if names:
            print(f"\n{title}\n  " + "\n  ".join(names))
    batch = describe_batch(found.batch_shapes, found.micro_batch_size, found.gradient_accumulation_steps)
    print(f"\nOne step, of {batch}:\n")
    if not found.collectives:
        print("Nothing is sent.")
        return
    header = ("collective", "along", "ranks", "times", "whole", "sent by a rank")
    values = [
        (
            each.kind,
            each.axis,
            str(each.num_ranks),
            str(each.count),
            size_text(each.num_bytes),
            size_text(each.sent_bytes),
        )
        for each in found.collectives
    ]
    show_rows(header, values)
    print(f"\nSent by a rank in a step: {size_text(sum(each.sent_bytes for each in found.collectives))}")
