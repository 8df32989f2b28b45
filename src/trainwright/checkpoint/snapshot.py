"""Host snapshots: a copy of a run's state in host memory, for saving while training continues, and to roll back to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainwright.backends import copy_to_host, host_buffers
from trainwright.checkpoint.encoding import ShardLocation, SplitTensor, decode, encode_split


class EncodedPart(NamedTuple):
    """One part of a checkpoint, as it is written."""

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]
    shard_locations: Mapping[str, ShardLocation]
    """Of each tensor that is a shard, where it lies in the whole."""


@dataclass(frozen=True)
class HostSnapshot:
    """Encoded parts of a checkpoint, ready to be written."""

    parts: Mapping[str, tuple[Any, Mapping[str, torch.Tensor]]]
    """By part: the JSON tree and the tensors that it names."""
    shard_locations: Mapping[str, Mapping[str, ShardLocation]] = field(default_factory=dict)
    """By part and name: of the tensors that are this rank's shards of larger ones, where they lie in them."""

    def __iter__(self) -> Iterator[EncodedPart]:
        return (EncodedPart(part, *encoded, self.shard_locations.get(part, {})) for part, encoded in self.parts.items())

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for _, tensors in self.parts.values() for tensor in tensors.values())

    def to_state(self) -> dict[str, Any]:
        """Returns the parts as they were, in memory of their own: loading may keep them, and training change them.

        What was a DTensor is a SplitTensor, with the shard of this rank.
        """
        return {part: decode(tree, _copies(tensors, shard_locations)) for part, tree, tensors, shard_locations in self}


def _copies(
    tensors: Mapping[str, torch.Tensor], shard_locations: Mapping[str, ShardLocation]
) -> dict[str, torch.Tensor | SplitTensor]:
    copies: dict[str, torch.Tensor | SplitTensor] = {key: tensor.clone() for key, tensor in tensors.items()}
    for key, place in shard_locations.items():
        copies[key] = SplitTensor(place.shape, [(place.offsets, tensors[key].clone())], layout=place.layout)
    return copies


def encode_parts(parts: Mapping[str, Any]) -> HostSnapshot:
    """Encodes without copying: the result shares memory with the state and is to be written before the next update."""
    encoded = {part: encode_split(state, name=part) for part, state in parts.items()}
    return HostSnapshot(
        {part: (each.tree, each.tensors) for part, each in encoded.items()},
        {part: each.shard_locations for part, each in encoded.items() if each.shard_locations},
    )


class HostBuffers:
    """Host memory as large as the state, made at the first copy and used again by the next ones.

    What `stage` returns is good until the next call of `stage`. A buffer is used again where the tensor of that name
    has the same shape, dtype and device as before; others are made anew, and those not needed are given back.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def copy_to_host(self, parts: Mapping[str, Any] | HostSnapshot) -> HostSnapshot:
        """Copies the state, which may be encoded already; returns when it may change again."""
        snapshot = parts if isinstance(parts, HostSnapshot) else encode_parts(parts)
        shared = snapshot.parts
        sources = {
            (part, key, tensor.shape, tensor.dtype, tensor.device): tensor
            for part, (_, tensors) in shared.items()
            for key, tensor in tensors.items()
        }
        # Those not needed any more go first, so that the old and the new ones do not exist at a time.
        self._buffers = {place: self._buffers[place] for place in sources if place in self._buffers}
        lacking = [place for place in sources if place not in self._buffers]
        made = host_buffers([sources[place] for place in lacking])
        self._buffers.update(zip(lacking, made, strict=True))
        copy_to_host(list(sources.values()), [self._buffers[place] for place in sources])
        copies = {place[:2]: self._buffers[place] for place in sources}
        return HostSnapshot(
            {part: (tree, {key: copies[part, key] for key in tensors}) for part, (tree, tensors) in shared.items()},
            snapshot.shard_locations,
        )
