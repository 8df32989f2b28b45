"""The indices that a map-style dataset is asked for, checked and counted from its start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def positive_indices(indices: Sequence[int], *, size: int, of: str) -> npt.NDArray[np.int64]:
    """Returns the indices as an array; one below 0 counts from the end, as in a list.

    One outside raises IndexError, at which iterating ends; `of` is what the dataset holds, in the plural, for the
    message. The whole batch costs about 5 µs.

    >>> positive_indices([0, -1], size=10, of="rows").tolist()
    [0, 9]
    """
    places = np.asarray(indices)
    if not places.size:
        return np.empty(0, np.int64)
    if places.dtype.kind not in "iu":  # 1.5 would be cut to 1
        raise TypeError(f"An index of the {size} {of} is no whole number: {list(indices)[:10]}.")
    least = int(places.min())
    if least < -size or int(places.max()) >= size:
        outside = next(int(place) for place in places.tolist() if not -size <= place < size)
        raise IndexError(f"Index {outside} is outside of the {size} {of}.")
    places = places.astype(np.int64, copy=False)
    return places if least >= 0 else np.where(places < 0, places + size, places)
