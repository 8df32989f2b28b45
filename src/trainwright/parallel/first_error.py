"""Whose error is shown: of ranks that fail together, the first one's, once.

When one rank fails, the others soon fail too, because it is gone. The first to fail leaves a note in the store by which
the ranks found each other; who finds a note of another rank keeps its own error for its log.
"""

from __future__ import annotations

import json
import os
import re
import socket
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.distributed_c10d import Store

from trainwright.errors import ConfigError

_REACH_SECONDS = 2.0
"""How long the store may take to be found. The process is about to end: nobody waits long to be polite."""


_LOST = re.compile(
    r"connection (closed|reset) by peer|broken pipe|socket closed|remote process (has terminated|exited)|"
    r"communicator was aborted|ncclRemoteError|connection was likely closed",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say when the process at the other end is gone."""
_SENDERS = re.compile(r"gloo|nccl|c10d|TCPStore", re.IGNORECASE)


class RaisedByAll(ConfigError):  # noqa: N818  # an error by what it inherits
    """An error that every rank raises in the same words: the first rank is the one that says it."""


class Failure(NamedTuple):
    """The error that a run ends with: which rank had it first, and what it was."""

    rank: int
    text: str


def note_failure(error: BaseException) -> bool:
    """Notes that this rank fails; returns whether it is the first to, and so the one that speaks.

    Asking again gives the same answer. Where the store is gone nobody else can speak, so this rank does.
    """
    rank = os.environ.get("RANK", "0")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return True
    if isinstance(error, RaisedByAll):
        return rank == "0"
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=_REACH_SECONDS),
            wait_for_workers=False,
        )
        if who_is(store, rank) not in ("", own_name()):
            return True  # this is another run's store: two runs share a port
        note = json.dumps([int(rank), str(error) or repr(error)])
        first = json.loads(store.compare_set(_key(), "", note))
    except (RuntimeError, KeyError, ValueError):  # torch's errors of the network are RuntimeErrors
        return True
    return bool(first[0] == int(rank))


def describe_lost_connection(error: BaseException) -> str | None:
    """Returns in few words how a collective lost another rank; None for every other error."""
    if not isinstance(error, RuntimeError):
        return None
    # Gloo raises plain RuntimeErrors, which name its source files; data that is read over a network does not.
    is_of_ranks = isinstance(error, dist.DistError) or _SENDERS.search(str(error)) is not None
    found = _LOST.search(str(error)) if is_of_ranks else None
    return None if found is None else found[0]


def noted_failure(store: Store) -> Failure | None:
    """Returns the first failure that a rank has noted, or None; does not wait for one."""
    if not store.check([_key()]):
        return None
    note: Any = json.loads(store.get(_key()))
    return Failure(*note)


def own_name() -> str:
    """Names this process for those who look for it."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def who_is(store: Store, rank: int | str, *, name: str = "") -> str:
    """Returns the name of the process that came first as this rank; `name` is noted if none has. "": none has."""
    key = f"trainwright/who/{rank}"
    if not name and not store.check([key]):
        return ""
    return str(store.compare_set(key, "", name), "utf-8")


def _key() -> str:
    # The launcher's store outlives a restart of the ranks, and with it what they have noted.
    return f"trainwright/first-error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
