"""Who writes what of a checkpoint that several ranks hold together, and how the trees of pipeline stages become one.

A piece is written by the first rank that has it, what is whole by the first of the ranks with the same layers. The
first rank of all writes the trees: with a pipeline each stage has keys of its own, and the union is saved. How the
ranks write at the same time is together.py's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.checkpoint.encoding import Encoded, encode_split
from trainwright.checkpoint.staging import StagedParts
from trainwright.errors import CheckpointError
from trainwright.parallel.collectives import Ranks


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others before a save."""

    first_of_stage: int
    failure: CheckpointError | None = None
    digest: str = ""
    """Of the names and shapes of all that lies in pieces: equal on the ranks of a stage, or pieces would be missing."""
    trees: Mapping[str, Any] | None = None
    keys: Mapping[str, frozenset[str]] | None = None
    """With a pipeline, of the first rank of each stage: its parts' trees, and the keys of their tensors."""


def share_of(parts: Mapping[str, Any], ranks: Ranks) -> StagedParts:
    """Returns what this rank writes of a checkpoint, sharing memory with the state; the first rank's has the trees.

    Every rank calls it. What any rank cannot save is refused on all of them.
    """
    mesh = ranks.mesh
    encoded: dict[str, Encoded] = {}
    failure: CheckpointError | None = None
    try:
        encoded = {part: encode_split(state, name=part) for part, state in parts.items()}
    except CheckpointError as error:
        failure = error
    report = _Report(mesh.first_of_stage, failure, _digest(encoded))
    if mesh.size("pipeline") > 1 and ranks.rank == mesh.first_of_stage:
        trees = {part: each.tree for part, each in encoded.items()}
        keys = {part: frozenset(each.tensors) for part, each in encoded.items()}
        report = _Report(mesh.first_of_stage, failure, report.digest, trees, keys)
    reports = ranks.gather(report)
    _refuse_differences(reports)
    stages = [each for each in reports if each.trees is not None and each.keys is not None]
    taken = {part: _taken(stages, part, before=mesh.first_of_stage) for part in encoded}
    mine = {part: _mine(each, taken[part], ranks) for part, each in encoded.items()}
    if ranks.is_first:
        trees = merge_trees([each.trees for each in stages if each.trees is not None]) if stages else {}
        all_trees = {part: trees.get(part, each.tree) for part, each in encoded.items()}
    else:
        all_trees = dict.fromkeys(encoded)
    return StagedParts(
        {part: (all_trees[part], {key: encoded[part].tensors[key] for key in mine[part]}) for part in encoded},
        {
            part: {key: each.places[key] for key in mine[part] if key in each.places}
            for part, each in encoded.items()
            if any(key in each.places for key in mine[part])
        },
    )


def _digest(encoded: Mapping[str, Encoded]) -> str:
    names = [[part, each.split_paths] for part, each in encoded.items()]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def _refuse_differences(reports: Sequence[_Report]) -> None:
    for report in reports:
        if report.failure is not None:
            raise report.failure
    for rank, report in enumerate(reports):
        first = report.first_of_stage
        if report.digest != reports[first].digest:
            raise CheckpointError(
                f"Ranks {first} and {rank} hold pieces of different tensors, so that no whole can be saved. Do the "
                "optimizers and hooks of all ranks have state for the same parameters?"
            )


def _taken(stages: Iterable[_Report], part: str, *, before: int) -> set[str]:
    """Returns the keys that earlier stages write: a tied weight on two stages is saved once."""
    keys: set[str] = set()
    for report in stages:
        if report.first_of_stage < before and report.keys is not None:
            keys |= report.keys[part]
    return keys


def _mine(encoded: Encoded, taken: set[str], ranks: Ranks) -> list[str]:
    first = ranks.mesh.first_of_stage
    mine = []
    for key, tensor in encoded.tensors.items():
        place = encoded.places.get(key)
        layout = None if place is None else place.layout
        if layout is None:
            writes = ranks.rank == first
        else:
            # A tensor without a value has no piece; that it was there, the first rank's file says.
            is_somewhere = tensor.numel() > 0 or (ranks.rank == first and 0 in (place.shape if place else ()))
            writes = layout.is_written_here(first) and is_somewhere
        if writes and key not in taken:
            mine.append(key)
    return mine


def merge_trees(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the trees of all parts from those of the stages, in their order; of equal keys the first counts.

    An optimizer's groups have the parameters of all stages. A stage may lack a group that has none of its parameters:
    then groups are the same whose settings are.
    """
    merged: dict[str, Any] = _union(stages)
    for name, optimizer in merged.get("optimizers", {}).items():
        saved = [stage["optimizers"][name]["groups"] for stage in stages]
        optimizer["groups"] = _merge_groups(saved)
    return merged


def _union(values: Sequence[Any]) -> Any:
    """Joins mappings key by key; of anything else the first counts."""
    first = values[0]
    if not isinstance(first, Mapping) or next(iter(first), "").startswith("$"):
        return first
    keys = dict.fromkeys(key for value in values if isinstance(value, Mapping) for key in value)
    if any(key.startswith("$") for key in keys):
        return first
    return {
        key: _union([value[key] for value in values if isinstance(value, Mapping) and key in value]) for key in keys
    }


def _merge_groups(stages: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    by_number = len({len(groups) for groups in stages}) == 1
    for groups in stages:
        for number, group in enumerate(groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            same = [
                known
                for place, known in enumerate(merged)
                if (place == number if by_number else {**known, "params": None} == {**settings, "params": None})
            ]
            if same:
                same[0]["params"] = [
                    *same[0]["params"],
                    *(name for name in group["params"] if name not in same[0]["params"]),
                ]
            else:
                merged.append({**settings, "params": list(group["params"])})
    return merged
