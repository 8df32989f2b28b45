"""Names the elements of tuple samples (`data.fields`), and converts mappings of any class to dicts.

A collator may return any Mapping, such as transformers' BatchEncoding. torch's functions for nested containers treat a
mapping of a class that is not registered as one object, which would be neither split nor moved to the device. Batches
are therefore converted where they are fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainwright.backends.private_torch import tree_leaves, tree_map
from trainwright.data.collators.stack import Stack
from trainwright.errors import ConfigError, DataError

Collator = Callable[[list[Any]], Any]


class NamedFields:
    """A collator that receives each tuple as a dict with these names.

    With `has_default_names`, the names are not set in the config; only pairs are then named, and mappings are
    unchanged.
    """

    def __init__(
        self, collator: Collator, names: Sequence[str], *, has_default_names: bool = False, where: object | None = None
    ) -> None:
        self.collator = collator
        self.names = tuple(names)
        self.has_default_names = has_default_names
        self.draws_nothing = bool(getattr(collator, "draws_nothing", False))
        self._where = where
        split = getattr(collator, "split", None)
        if split is not None:
            self.split = split

    def __call__(self, samples: list[Any]) -> Any:
        """Returns the batch of the named samples."""
        if self.has_default_names and not is_tuple(samples[0]):
            return self.collator(samples)
        return self.collator([self._name(sample) for sample in samples])

    def _name(self, sample: Any) -> dict[str, Any]:
        names = self.names
        if is_tuple(sample) and len(sample) == len(names):
            return dict(zip(names, sample, strict=True))
        if self.has_default_names:
            given = f"{len(sample)} elements" if is_tuple(sample) else f"a {type(sample).__name__}"
            raise DataError(
                f"A classification trainer reads pairs as ({', '.join(names)}), but a sample has {given}. Name the "
                "elements with data.fields, or return a dict from the dataset."
            )
        if len(names) == 1 and not isinstance(sample, Mapping) and not is_tuple(sample):
            return {names[0]: sample}
        if isinstance(sample, Mapping):
            problem = f"the samples are mappings, which have names already ({', '.join(map(str, sample))}). Remove it."
        elif is_tuple(sample):
            problem = f"names {len(names)} elements ({', '.join(names)}), but a sample has {len(sample)}."
        else:
            problem = f"names {len(names)} elements, but a sample is a {type(sample).__name__}, not a tuple."
        raise DataError(f"data.fields: {problem}", where=self._where)


def is_tuple(sample: Any) -> bool:
    """Returns True for a sample without names: a tuple, a list or a named tuple."""
    return isinstance(sample, (tuple, list))


def plain_mappings(batch: Any) -> Any:
    """Returns a batch in which every mapping that torch does not traverse is a dict, at any depth.

    >>> from collections import UserDict
    >>> plain_mappings({"query": UserDict(ids=1), "labels": [2]})
    {'query': {'ids': 1}, 'labels': [2]}
    """
    if type(batch) is dict and all(isinstance(value, torch.Tensor) for value in batch.values()):
        return batch  # the common case, without a walk over nested containers
    if not any(isinstance(leaf, Mapping) for leaf in tree_leaves(batch)):
        return batch
    return tree_map(_plain_leaf, batch)


def _plain_leaf(leaf: Any) -> Any:
    return {name: plain_mappings(value) for name, value in leaf.items()} if isinstance(leaf, Mapping) else leaf


def returns_dicts(collator: Any) -> bool:
    """Returns True for a collator of this package, which needs no `plain_mappings`."""
    if isinstance(collator, NamedFields):
        return returns_dicts(collator.collator)
    return type(collator).__module__.startswith(f"{Stack.__module__.rpartition('.')[0]}.")


def reject_own_generator(collator: Any, *, where: object | None = None) -> None:
    """Rejects a transformers collator with a seed, because its generator continues from batch to batch.

    A resumed run would mask other tokens. The run's own randomness is a function of the seed and the position.
    """
    if getattr(collator, "seed", None) is not None and hasattr(collator, "create_rng"):
        raise ConfigError(
            f"data.collator.seed: {type(collator).__name__} draws from a generator of its own, which is not part of a "
            "checkpoint, so a resumed run would differ. Remove it: batches are seeded from the run's seed and their "
            "position.",
            where=where,
        )
