"""What a stream is: samples without an index, which can only be read one after the other.

Any iterable is one. What more it can do is asked for by name, in the words of Hugging Face's IterableDataset:
`num_shards` and `shard(num_shards=, index=)` let ranks and workers read different parts of it, `state_dict` and
`load_state_dict` let a resumed run go on without reading what came before, `set_epoch` tells it which pass begins.
How lanes of a stream become batches is in lanes.py and stream_loader.py.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from trainwright.errors import DataError


class StreamBrokenError(DataError):
    """An error after which a stream cannot go on: no row that could be left out."""


def is_stream(dataset: Any) -> bool:
    """Can this dataset only be iterated? One that offers both, an index and iteration, is read by its index."""
    return hasattr(dataset, "__iter__") and not (has_index(dataset) and hasattr(dataset, "__len__"))


def has_index(dataset: Any) -> bool:
    """Has the dataset a `__getitem__` of its own? torch gives every Dataset one that only raises."""
    own = getattr(type(dataset), "__getitem__", None)
    return own is not None and own is not Dataset.__getitem__
