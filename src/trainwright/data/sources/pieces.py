"""The pieces of files that a stream reads one after the other: its shards are runs of them, its state lies in one.

What begin and end count, bytes or row groups, is up to the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.data.sources.locations import FileLocation
from trainwright.data.stream import StreamBrokenError
from trainwright.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """A stretch of a file."""

    location: FileLocation
    begin: int = 0
    end: int | None = None
    """None: up to the end of the file."""

    def identify(self) -> dict[str, Any]:
        """Returns what tells this piece from others, wherever the folder that holds the file may be."""
        return {"file": self.location.label, "size": self.location.size, "begin": self.begin, "end": self.end}


def share_of(pieces: Sequence[Piece], *, num_shards: int, index: int) -> list[Piece]:
    """Returns a contiguous share of the pieces; the shares in order are all of them."""
    if not 0 <= index < num_shards <= len(pieces):
        raise ConfigError(
            f"Shard {index} of {num_shards} was asked for, of a stream that can be cut into {len(pieces)} shards."
        )
    count = len(pieces)
    return list(pieces[count * index // num_shards : count * (index + 1) // num_shards])


def identify_piece(pieces: Sequence[Piece], number: int) -> dict[str, Any]:
    """Returns what a state says of the piece that it lies in; behind the last one, of that one."""
    place = min(number, len(pieces) - 1)
    return {"number": place, **pieces[place].identify()}


def check_piece(pieces: Sequence[Piece], saved: Mapping[str, Any]) -> None:
    """Refuses to go on where another piece is in the place of the one that a state lies in.

    With a file more or less before it, rows would be read twice or never.
    """
    place = saved["number"]
    found = identify_piece(pieces, place)
    if found != dict(saved):
        now = f"it is {_show(found)}" if found["number"] == place else f"there are only {len(pieces)}"
        raise StreamBrokenError(
            f"The stream cannot go on where it stopped: its piece {place} (counted from 0) was {_show(saved)}, and now "
            f"{now}. Put the files back as they were, or start a run without this state."
        )


def _show(piece: Mapping[str, Any]) -> str:
    stretch = "" if not piece["begin"] and piece["end"] is None else f" from {piece['begin']} to {piece['end']}"
    return f"{piece['file']} ({piece['size']} bytes){stretch}"
