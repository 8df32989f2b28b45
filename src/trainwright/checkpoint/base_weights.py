"""Frozen pretrained weights, which checkpoints store by reference: a source, and a hash of each weight.

build/ hashes them when the model is built. A save leaves out those that are still frozen and have the same bits; a
start builds the model from the same source and compares the hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainwright.errors import CheckpointError
from trainwright.parallel.mesh import local

PART = "base"
"""The part of a checkpoint with the references; a checkpoint without references does not have it."""

_HASHING_THREADS = 4
_CHUNK = 1 << 22
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def hash_weights(weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Returns the sha256 of each full tensor in host memory: of its dtype, shape and bytes."""

    def digest(tensor: torch.Tensor) -> str:
        content = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        result = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        result.update(content.data)
        return result.hexdigest()

    with ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="hash") as threads:
        return dict(zip(weights, threads.map(digest, weights.values()), strict=True))


@torch.no_grad()
def bit_checksums(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns two sums over the bits of each tensor, the second weighted by position, computed on its device.

    Unlike version counters they notice changes through `.data`. Sharded tensors are summed on this rank alone.
    """
    sums: list[torch.Tensor] = []
    for tensor in map(local, tensors):
        bits = tensor.detach().contiguous().reshape(-1)
        bits = (torch.view_as_real(bits).reshape(-1) if bits.is_complex() else bits).view(
            _INTEGERS[bits.element_size()]
        )
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for number, chunk in enumerate(bits.split(_CHUNK)):
            values = chunk.long()
            positions = torch.arange(1, len(values) + 1, device=bits.device) + number * _CHUNK
            total += torch.stack([values.sum(), (values * positions).sum()])
        sums.append(total)
    # One copy to the host for all of them.
    return [(first, second) for first, second in torch.stack(sums).tolist()] if sums else []
