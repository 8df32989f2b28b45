"""Which piece of which document stands where in which row: best fit, longest first.

A plan is a pure function of (lengths, row length, seed), made once and held in a few arrays, so that any rank or
worker finds any row. A million documents take about a second. What stands in a row is written by pack_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainwright.data.order import Indices, mix_seed, permute

_PLAN_STREAM = 0x9ACC  # keeps the plan's permutation apart from the epochs' ones of the same seed


@dataclass(frozen=True)
class Plan:
    """The pieces of all rows, row after row: piece p is `sizes[p]` tokens of `documents[p]` from `offsets[p]` on."""

    length: int
    """The tokens that fit into a row."""
    lengths: Indices
    """The tokens of every document."""
    documents: Indices
    offsets: Indices
    sizes: Indices
    row_starts: Indices
    """Row r holds the pieces row_starts[r] … row_starts[r + 1] − 1."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.row_starts) - 1

    @property
    def fill(self) -> float:
        """The share of all places in rows that hold a token instead of padding."""
        return float(self.lengths.sum()) / max(1, self.num_rows * self.length)

    def row(self, number: int) -> list[tuple[int, int, int]]:
        """Returns (document, offset, size) of each piece of a row."""
        pieces = slice(int(self.row_starts[number]), int(self.row_starts[number + 1]))
        columns = (self.documents[pieces], self.offsets[pieces], self.sizes[pieces])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def make_plan(lengths: Indices, *, length: int, seed: int) -> Plan:
    """Packs documents of these lengths into rows of `length` tokens.

    A document longer than a row is cut: whole rows of it come first, and its rest is packed like a document. The
    longest piece is placed first, each into the row that it fills best; the seed decides among equal ones.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    whole, rest = np.divmod(lengths, length)
    cut = np.flatnonzero(whole)
    num_whole = int(whole.sum())
    whole_documents = np.repeat(cut, whole[cut])
    # The n-th whole row counts from its document's first one.
    firsts = np.repeat(np.cumsum(whole[cut]) - whole[cut], whole[cut])
    whole_offsets = (np.arange(num_whole) - firsts) * length

    pieces = _longest_first(rest, seed)
    rows = _fit(rest[pieces], length)
    by_row = np.argsort(rows, kind="stable")
    pieces = pieces[by_row]
    per_row = np.concatenate([np.ones(num_whole, dtype=np.int64), np.bincount(rows)])
    return Plan(
        length=length,
        lengths=lengths,
        documents=np.concatenate([whole_documents, pieces]),
        offsets=np.concatenate([whole_offsets, whole[pieces] * length]),
        sizes=np.concatenate([np.full(num_whole, length, dtype=np.int64), rest[pieces]]),
        row_starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(per_row)]),
    )


def _longest_first(sizes: Indices, seed: int) -> Indices:
    """Returns which sizes are not 0, in falling order, equal ones in an order by the seed."""
    if not len(sizes):
        return np.empty(0, dtype=np.int64)
    shuffled = permute(np.arange(len(sizes), dtype=np.int64), len(sizes), key=mix_seed(seed, _PLAN_STREAM))
    shuffled = shuffled[sizes[shuffled] > 0]
    return shuffled[np.argsort(-sizes[shuffled], kind="stable")]


def _fit(sizes: Indices, length: int) -> Indices:
    """Returns the row of each piece; pieces come in falling order of size.

    Pieces of one size are placed together: a row that is the best for one of them stays the best for the next until
    it cannot hold another, so each takes as many as fit. A bitmap tells in which amounts of room there is a row.
    """
    rows_with_room: list[list[int]] = [[] for _ in range(length)]
    bitmap = 0  # bit n: there is a row with room for exactly n more tokens
    placed: list[int] = []
    num_rows = 0
    values, counts = np.unique(-sizes, return_counts=True)
    for size, left in zip((-values).tolist(), counts.tolist(), strict=True):
        while left:
            fitting = bitmap >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                candidates = rows_with_room[room]
                row = candidates.pop()
                if not candidates:
                    bitmap ^= 1 << room
            else:
                room, row = length, num_rows
                num_rows += 1
            taken = min(room // size, left)
            placed += [row] * taken
            left -= taken
            room -= taken * size
            if room:
                rows_with_room[room].append(row)
                bitmap |= 1 << room
    return np.array(placed, dtype=np.int64)
