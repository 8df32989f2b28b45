"""Host snapshots: copies of a run's state in host memory, for saving during training and for rollback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainwright.backends import begin_copy_to_host, host_buffers
from trainwright.checkpoint.encoding import Encoded, SplitTensor, decode, encode


@dataclass(frozen=True)
class HostSnapshot:
    """Encoded parts of a checkpoint, to be written after `wait`."""

    parts: Mapping[str, Encoded]
    wait: Callable[[], None] = lambda: None
    """Waits until the tensors are complete; a GPU may still be copying them."""

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for encoded in self.parts.values() for tensor in encoded.tensors.values())

    def to_state(self) -> dict[str, Any]:
        """Returns copies of the parts, which the caller may keep or change.

        A DTensor is returned as a SplitTensor with this rank's shard.
        """
        state = {}
        for part, encoded in self.parts.items():
            copies: dict[str, torch.Tensor | SplitTensor] = {}
            for key, tensor in encoded.tensors.items():
                location = encoded.shard_locations.get(key)
                copies[key] = copy = tensor.clone()
                if location is not None:
                    copies[key] = SplitTensor(location.shape, [(location.offsets, copy)], layout=location.layout)
            state[part] = decode(encoded.tree, copies)
        return state


def encode_parts(parts: Mapping[str, Any], *, accepts_shards: bool = True) -> HostSnapshot:
    """Encodes without copying: the result shares memory with the state, so write it before the next update."""
    return HostSnapshot(
        {part: encode(state, name=part, accepts_shards=accepts_shards) for part, state in parts.items()}
    )


class HostBuffers:
    """Host memory as large as the state, allocated by the first copy and reused by the next ones.

    The result of `copy_to_host` is valid until the next call. A buffer is reused if the tensor of that key has the
    same shape, dtype and device as before; other buffers are allocated, and unneeded ones are freed.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[object, ...], torch.Tensor] = {}

    def copy_to_host(self, parts: Mapping[str, Any] | HostSnapshot, *, overlaps: bool = False) -> HostSnapshot:
        """Copies the state, which may already be encoded; the state may change after this returns.

        With `overlaps` the copy may not be complete yet: call `wait` of the result before reading it.
        """
        snapshot = parts if isinstance(parts, HostSnapshot) else encode_parts(parts)
        sources = {
            (part, key, tensor.shape, tensor.dtype, tensor.device): tensor
            for part, encoded in snapshot.parts.items()
            for key, tensor in encoded.tensors.items()
        }
        # Unneeded buffers are freed first, so that old and new ones do not exist at the same time.
        self._buffers = {key: self._buffers[key] for key in sources if key in self._buffers}
        missing = [key for key in sources if key not in self._buffers]
        self._buffers.update(zip(missing, host_buffers([sources[key] for key in missing]), strict=True))
        tensors, buffers = list(sources.values()), [self._buffers[key] for key in sources]
        wait = begin_copy_to_host(tensors, buffers, waits=not overlaps)
        copies = {key[:2]: self._buffers[key] for key in sources}
        return HostSnapshot(
            {
                part: encoded._replace(tensors={key: copies[part, key] for key in encoded.tensors})
                for part, encoded in snapshot.parts.items()
            },
            wait,
        )
