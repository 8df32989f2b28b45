"""Frozen pretrained weights, which checkpoints store by reference: a source and a hash of each weight.

build/ hashes them when the model is built. A save omits those that are still frozen and bitwise unchanged; a start
builds the model from the same source and compares the hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from trainwright.errors import CheckpointError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import local
from trainwright.progress import progress

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
        advance(tensor.nbytes)
        return result.hexdigest()

    size = sum(tensor.nbytes for tensor in weights.values())
    with (
        progress("Hashing weights", total=size, unit="bytes") as advance,
        ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="hash") as threads,
    ):
        return dict(zip(weights, threads.map(digest, weights.values()), strict=True))


@torch.no_grad()
def bit_checksums(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns two sums over the bits of each tensor, the second weighted by position, computed on its device.

    Unlike version counters, they detect changes through `.data`. Sharded tensors are summed on this rank alone.
    """
    sums: list[torch.Tensor] = []
    for tensor in map(local, tensors):
        bits = tensor.detach().contiguous().reshape(-1)
        bits = (torch.view_as_real(bits).reshape(-1) if bits.is_complex() else bits).view(
            _INTEGERS[bits.element_size()]
        )
        total = torch.zeros(2, dtype=torch.int64, device=bits.device)
        for number, chunk in enumerate(torch.split(bits, _CHUNK)):
            values = chunk.long()
            positions = torch.arange(1, len(values) + 1, device=bits.device) + number * _CHUNK
            total += torch.stack([values.sum(), (values * positions).sum()])
        sums.append(total)
    # One copy to the host for all of them.
    return [(first, second) for first, second in torch.stack(sums).tolist()] if sums else []


def weights_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def check_references(recorded: Mapping[str, Any], hashes: Mapping[str, str], *, where: object) -> list[str]:
    """Returns the names of the weights that a checkpoint stores by reference; raises if `hashes` differ."""
    expected: Mapping[str, str] = recorded["hashes"]
    other = [name for name, digest in expected.items() if hashes.get(name) != digest]
    if other:
        more = ", …" if len(other) > 5 else ""
        raise CheckpointError(
            f"It stores {len(expected)} frozen weights by reference to model.pretrained ({recorded['source']}), but "
            f"these differ now: {', '.join(other[:5])}{more}. Restore the files and the settings of the model that the "
            "run used.",
            where=where,
        )
    return list(expected)


class BaseWeights:
    """The weights of a built model that checkpoints may store by reference, by the names in the model."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        source: str,
        hashes: Mapping[str, str],
        rebuild: Callable[[], torch.nn.Module],
    ) -> None:
        """`hashes` are those of the full tensors; `rebuild` builds the model again, from the same source."""
        self._source = source
        self._hashes = hashes
        self._rebuild = rebuild
        own = weights_of(model)
        here = [name for name in hashes if name in own]  # a stage of a pipeline has some of them
        self._checksums = dict(zip(here, bit_checksums(own[name] for name in here), strict=True))

    def references(self, model: torch.nn.Module, ranks: Ranks) -> dict[str, Any]:
        """Returns the part of a checkpoint that refers to the weights that are frozen and unchanged; collective."""
        own = weights_of(model)
        trainable = {name for name in self._checksums if own[name].requires_grad}
        changed = set().union(*ranks.gather(trainable | self._changed(model, skip=trainable)))
        hashes = {name: digest for name, digest in self._hashes.items() if name not in changed}
        return {"source": self._source, "hashes": hashes} if hashes else {}

    def complete(
        self, state: Mapping[str, Any], recorded: Mapping[str, Any], model: torch.nn.Module, *, where: object
    ) -> tuple[Mapping[str, Any], list[str]]:
        """Returns a saved state for loading into the model, and the names of weights that the model already has.

        Weights of the source that have changed since the model was built, because they were unfrozen, are read again.
        """
        names = check_references(recorded, self._hashes, where=where)
        changed = self._changed(model) & set(names)
        if changed:
            again = weights_of(self._rebuild())
            check_references(
                recorded, hash_weights({name: again[name] for name in names if name in again}), where=where
            )
            state = {**state, **{name: again[name].detach() for name in changed}}
        return state, [name for name in names if name not in changed]

    def _changed(self, model: torch.nn.Module, *, skip: Iterable[str] = ()) -> set[str]:
        own = weights_of(model)
        names = [name for name in self._checksums if name not in skip]
        found = bit_checksums(own[name] for name in names)
        return {name for name, sums in zip(names, found, strict=True) if sums != self._checksums[name]}
