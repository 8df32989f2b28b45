"""Host snapshots: copies of a run's state in host memory, for saving while training continues and for rollback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trainwright.backends import copy_to_host, host_buffers
from trainwright.checkpoint.encoding import ShardLocation, SplitTensor, decode, encode_split


class EncodedPart(NamedTuple):
    """One part of a checkpoint, encoded for writing."""

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]
    shard_locations: Mapping[str, ShardLocation]
    """The location in the full tensor of each tensor that is a shard."""


@dataclass(frozen=True)
class HostSnapshot:
    """Encoded parts of a checkpoint, ready to be written."""

    parts: Mapping[str, tuple[Any, Mapping[str, torch.Tensor]]]
    """By part: the JSON tree and the tensors that it refers to."""
    shard_locations: Mapping[str, Mapping[str, ShardLocation]] = field(default_factory=dict)
    """By part and key: the location in the full tensor of each tensor that is this rank's shard."""

    def __iter__(self) -> Iterator[EncodedPart]:
        return (EncodedPart(part, *encoded, self.shard_locations.get(part, {})) for part, encoded in self.parts.items())

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for _, tensors in self.parts.values() for tensor in tensors.values())

    def to_state(self) -> dict[str, Any]:
        """Returns copies of the parts, which a loader may keep and training may change.

        A DTensor comes back as a SplitTensor with this rank's shard.
        """
        state = {}
        for part, tree, tensors, shard_locations in self:
            copies: dict[str, torch.Tensor | SplitTensor] = {key: tensor.clone() for key, tensor in tensors.items()}
            for key, location in shard_locations.items():
                shards = [(location.offsets, tensors[key].clone())]
                copies[key] = SplitTensor(location.shape, shards, layout=location.layout)
            state[part] = decode(tree, copies)
        return state


def encode_parts(parts: Mapping[str, Any]) -> HostSnapshot:
    """Encodes without copying: the result shares memory with the state, so write it before the next update."""
    encoded = {part: encode_split(state, name=part) for part, state in parts.items()}
    return HostSnapshot(
        {part: (each.tree, each.tensors) for part, each in encoded.items()},
        {part: each.shard_locations for part, each in encoded.items() if each.shard_locations},
    )


class HostBuffers:
    """Host memory as large as the state, allocated by the first copy and reused by the next ones.

    The result of `copy_to_host` is valid until the next call. A buffer is reused if the tensor of that key has the
    same shape, dtype and device as before; other buffers are allocated, and unneeded ones are freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def copy_to_host(self, parts: Mapping[str, Any] | HostSnapshot) -> HostSnapshot:
        """Copies the state, which may be encoded already; the state may change when this returns."""
        snapshot = parts if isinstance(parts, HostSnapshot) else encode_parts(parts)
        sources = {
            (part, key, tensor.shape, tensor.dtype, tensor.device): tensor
            for part, (_, tensors) in snapshot.parts.items()
            for key, tensor in tensors.items()
        }
        # Unneeded buffers are freed first, so that old and new ones do not exist at the same time.
        self._buffers = {key: self._buffers[key] for key in sources if key in self._buffers}
        missing = [key for key in sources if key not in self._buffers]
        self._buffers.update(zip(missing, host_buffers([sources[key] for key in missing]), strict=True))
        copy_to_host(list(sources.values()), [self._buffers[key] for key in sources])
        copies = {key[:2]: self._buffers[key] for key in sources}
        return HostSnapshot(
            {
                part: (tree, {key: copies[part, key] for key in tensors})
                for part, (tree, tensors) in snapshot.parts.items()
            },
            snapshot.shard_locations,
        )
