"""Joins the processes of a run: the launcher's variables, the rendezvous, the process group, and consistency checks.

Settings, code and versions of all ranks are compared before anything is built. If several ranks fail, only the first
error is shown.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainwright.config import RunConfig
from trainwright.config.builtin import KIND_FOLDERS
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.collectives import Ranks, first_rank_keeps_notes, text_of
from trainwright.parallel.mesh import lay_out

_REACH_SECONDS = 2.0
"""Timeout of the connection to the store when the process is ending."""


_LOST = re.compile(
    r"connection (closed|reset) by peer|broken pipe|socket closed|remote process (has terminated|exited)|"
    r"communicator was aborted|ncclRemoteError|connection was likely closed",
    re.IGNORECASE,
)
"""Messages of gloo, NCCL and torch's store when the other process has ended."""
_BACKENDS = re.compile(r"gloo|nccl|c10d|TCPStore", re.IGNORECASE)


class RaisedByAll(ConfigError):  # noqa: N818  # an error by what it inherits
    """An error that every rank raises with the same message: rank 0 shows it."""


class RankFailure(NamedTuple):
    """The first error of a run and its rank."""

    rank: int
    text: str


def note_failure(error: BaseException) -> bool:
    """Records that this rank fails; returns True if it is the first failure, whose error this rank shows.

    A second call returns the same. If the store cannot be reached, this rank shows its error, because no other rank can
    be notified.
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
        if process_of(store, rank) not in ("", own_name()):
            return True  # the store of another run: two runs share a port
        note = json.dumps([int(rank), str(error) or repr(error)])
        first = json.loads(store.compare_set(_key(), "", note))
    except (RuntimeError, KeyError, ValueError):  # torch raises RuntimeErrors for the network
        return True
    return bool(first[0] == int(rank))


def describe_lost_connection(error: BaseException) -> str | None:
    """Returns the part of an error message that shows that a collective lost another rank; None for other errors."""
    if not isinstance(error, RuntimeError):
        return None
    # gloo raises plain RuntimeErrors that contain its source files; errors of reading data do not.
    is_collective = isinstance(error, dist.DistError) or _BACKENDS.search(str(error)) is not None
    found = _LOST.search(str(error)) if is_collective else None
    return None if found is None else found[0]


def noted_failure(store: Store) -> RankFailure | None:
    """Returns the first recorded failure of a rank, or None; does not wait."""
    if not store.check([_key()]):
        return None
    note: Any = json.loads(store.get(_key()))
    return RankFailure(*note)


def own_name() -> str:
    """Returns the name of this process for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def process_of(store: Store, rank: int | str, *, name: str = "") -> str:
    """Returns the name of the first process that joined as this rank; `name` is recorded if there is none. "": none."""
    key = f"trainwright/process/{rank}"
    if not name and not store.check([key]):
        return ""
    return str(store.compare_set(key, "", name), "utf-8")


def _key() -> str:
    # The launcher's store outlives a restart of the ranks, with all of its keys.
    return f"trainwright/first-error/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


ARRIVE_SECONDS = 300.0
"""How long the first rank waits for the last: imports from a slow disk take minutes on many machines."""

_ARRIVED, _INVITATION, _ANSWERS, _OPEN = "arrived", "invitation", "answers", "open"
_POLL_SECONDS = (0.02, 0.5)  # the first and the longest pause; thousands of ranks poll one store


def meet(store: Store, rank: int, size: int, *, arrive_seconds: float = ARRIVE_SECONDS) -> str:
    """Waits until all ranks have joined, and returns the name of the rendezvous, which is unique in the store.

    If a rank does not join, or fails in the meantime, every rank raises an error that names it.
    """
    notes: Any = PrefixStore("trainwright/rendezvous", store)  # torch's stubs lack `append`
    if first_rank_keeps_notes():
        _reject_duplicate_rank(store, rank)
    own = uuid.uuid4().hex
    notes.append(_ARRIVED, f"{rank} {own}\n")
    if rank == 0:
        return _host(notes, store, own, size, arrive_seconds)
    rendezvous = ""

    def is_open() -> bool:
        nonlocal rendezvous
        if not rendezvous and notes.check([f"{_INVITATION}/{own}"]):
            rendezvous = text_of(notes.get(f"{_INVITATION}/{own}"))
            notes.add(f"{_ANSWERS}/{rendezvous}", 1)
        return bool(rendezvous) and notes.check([f"{_OPEN}/{rendezvous}"])

    # Rank 0 times out first, and knows which ranks are missing.
    if not _wait(is_open, store, rank, arrive_seconds + 10):
        raise TrainwrightError(f"Rank {rank} waited {arrive_seconds + 10:.0f} s for rank 0. Check that it is started.")
    return rendezvous


def _host(notes: Store, store: Store, own: str, size: int, arrive_seconds: float) -> str:
    """Invites ranks until all have answered."""
    rendezvous = uuid.uuid4().hex
    invited: set[str] = set()
    missing: list[int] = []

    def has_all() -> bool:
        # The last entry of a rank applies.
        names = dict(line.split() for line in text_of(notes.get(_ARRIVED)).splitlines())
        missing[:] = [rank for rank in range(size) if str(rank) not in names]
        for name in set(names.values()) - invited - {own}:
            notes.set(f"{_INVITATION}/{name}", rendezvous)
            invited.add(name)
        return not missing and notes.add(f"{_ANSWERS}/{rendezvous}", 0) >= size - 1

    if not _wait(has_all, store, 0, arrive_seconds):
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        state = f"rank {shown} is missing" if missing else "one of them has died"
        raise TrainwrightError(
            f"Not all {size} ranks have arrived within {arrive_seconds:.0f} s: {state}. Start them all, with the same "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE; the output of a failed rank has its error."
        )
    notes.set(f"{_OPEN}/{rendezvous}", "1")
    return rendezvous


def _wait(is_done: Callable[[], bool], store: Store, rank: int, seconds: float) -> bool:
    """Polls until `is_done` or the timeout; raises a failure that another rank records in the meantime."""
    until, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    while time.monotonic() < until:
        try:
            if is_done():
                return True
            failure = noted_failure(store) if first_rank_keeps_notes() else None
        except RuntimeError as error:  # the connection was closed
            raise TrainwrightError(
                f"Rank {rank} has lost the store of the run during the rendezvous: rank 0 or the launcher has died. "
                "Its output has the reason."
            ) from error
        if failure is not None and failure.rank != rank:
            raise TrainwrightError(f"Rank {failure.rank} failed at start-up: {failure.text}")
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_SECONDS[1])
    return False


def _reject_duplicate_rank(store: Store, rank: int) -> None:
    """Raises if two processes have the same rank, because two runs share a port."""
    own = own_name()
    first = process_of(store, rank, name=own)
    if first != own:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"Two processes are rank {rank} of the run at {address}: {first}, and this one, {own}. "
            "Two runs use the same MASTER_PORT: use another one."
        )


ANSWER_SECONDS = 25.0
"""How long a rank may take to answer after joining; otherwise it is considered dead, and all ranks exit within 30 s."""

_MAX_FILES = 2000
"""The maximum number of compared files of a package; hashing them takes 0.1 s."""
_MAX_SHOWN = 3
_CLOCK_DIGITS = 4  # hours and minutes
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunFacts:
    """Facts that must be equal on all ranks, by name, as text."""

    settings: Mapping[str, str]
    """The config's settings: dotted name → value as JSON."""
    code: Mapping[str, str]
    """File → hash of its content."""
    versions: Mapping[str, str]
    """The versions of Python and torch; trainwright is compared by its files."""


def facts_of(config: RunConfig) -> RunFacts:
    """Returns the facts of this process: its settings and its code.

    The code is that of trainwright, the files next to the YAML file and in its folders of components, and the
    packages that the config names.
    """
    settings = {**dict(_flatten(config.to_dict())), "name": _without_clock(config.name)}
    code = {f"trainwright/{name}": digest for name, digest in _hashes(_PACKAGE, "**/*.py")}
    for pattern in ("*.py", *(f"{folder}/**/*.py" for folder in KIND_FOLDERS.values())):
        code.update(_hashes(config.project_dir, pattern))
    for name in _named_modules(config):
        code.update(_named_code(name, config.project_dir))
    versions = {"Python": platform.python_version(), "torch": str(torch.__version__)}
    return RunFacts(settings, code, versions)


def _without_clock(name: str) -> str:
    """Returns a run's name, with its digits replaced by 0 if it may contain a time, which differs between ranks.

    build/run.py then uses rank 0's name on all ranks.
    """
    return re.sub(r"\d", "0", name) if len(re.findall(r"\d", name)) >= _CLOCK_DIGITS else name


def reject_other_runs(store: Store, rank: int, size: int, facts: RunFacts) -> None:
    """Raises the same error on every rank if the facts of any differ from rank 0's; every rank must call it."""
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    own = {"size": {"WORLD_SIZE": str(size)}, **asdict(facts)}
    if rank == 0:
        store.set("facts", json.dumps(own))
        verdicts = [_wait_for(store, f"verdict/{other}", other) for other in range(1, size)]
        store.set("verdict", next(filter(None, verdicts), ""))
    else:
        first = json.loads(_wait_for(store, "facts", 0))
        store.set(f"verdict/{rank}", _difference(first, own, rank))
    verdict = _wait_for(store, "verdict", 0)
    if verdict:
        store.set(f"received/{rank}", "1")
        if rank == 0:  # this rank may have the store, and must not exit before the others have read it
            for other in range(1, size):
                _wait_for(store, f"received/{other}", other)
        raise RaisedByAll(verdict)


def _difference(first: Mapping[str, Mapping[str, str]], own: Mapping[str, Mapping[str, str]], rank: int) -> str:
    """Returns a message that describes the difference from rank 0; "" if there is none."""
    for kind, differs, advice in (
        ("size", "another environment", "Use the same WORLD_SIZE; another run may use this MASTER_PORT."),
        ("versions", "another environment", "Use the same environment on every machine."),
        ("settings", "other settings", "Start every rank with the same file and the same overrides."),
        ("code", "other code", "Use the same files on every machine, or a shared folder."),
    ):
        names = sorted(first[kind].keys() | own[kind].keys())
        different = [name for name in names if first[kind].get(name) != own[kind].get(name)]
        if not different:
            continue
        shown = []
        for name in different[:_MAX_SHOWN]:
            if kind != "code":
                values = own[kind].get(name, "not set"), first[kind].get(name, "not set")
                shown.append(f"{name} is {values[0]}, on rank 0 {values[1]}")
            elif name in own[kind]:
                shown.append(f"{name} differs" if name in first[kind] else f"{name} is not on rank 0")
            else:
                shown.append(f"{name} is missing")
        rest = f"; and {len(different) - _MAX_SHOWN} more" if len(different) > _MAX_SHOWN else ""
        process = f"Rank {rank} (on {socket.gethostname()})"
        return f"{process} has {differs} than rank 0: {'; '.join(shown)}{rest}. {advice}"
    return ""


def _wait_for(store: Store, key: str, rank: int) -> str:
    try:
        return str(store.get(key), "utf-8")
    except RuntimeError as error:  # a timeout, or a closed connection
        raise TrainwrightError(
            f"Rank {rank} arrived, but did not answer within {ANSWER_SECONDS:.0f} s: it has died at start-up. "
            "Its output has the reason."
        ) from error


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, json.dumps(value, default=str, sort_keys=True)


def _hashes(folder: Path, pattern: str) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob(pattern))[:_MAX_FILES]:
        if path.is_file():
            yield path.relative_to(folder).as_posix(), _hash(path)


def _hash(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _named_modules(config: RunConfig) -> set[str]:
    """Returns the files and modules of the config's components and imports."""

    def types(value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            kind = value.get("type")
            if isinstance(kind, str) and ":" in kind:
                yield kind.rpartition(":")[0]
            for item in value.values():
                yield from types(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from types(item)

    return {*types(config.to_dict()), *config.imports}


def _named_code(name: str, folder: Path) -> dict[str, str]:
    """Returns the hashes of a file, or of the package of a module, that a config names."""
    if name.endswith(".py") or "/" in name:
        path = folder / name
        return {name: _hash(path)} if path.is_file() else {}
    top = name.partition(".")[0]
    if top in (_PACKAGE.name, *sys.stdlib_module_names):
        return {}
    if (folder / top).is_dir():
        return {f"{top}/{file}": digest for file, digest in _hashes(folder / top, "**/*.py")}
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}  # the import itself reports the error
    if found is None or found.origin is None:
        return {}
    if found.submodule_search_locations is None:
        return {top: _hash(Path(found.origin))}
    return {f"{top}/{file}": digest for file, digest in _hashes(Path(found.origin).parent, "**/*.py")}


COLLECTIVE_SECONDS = 30 * 60
"""torch's timeout of a collective; hooks/watchdog.py finds a stuck rank sooner."""

_LAUNCHERS = "`trainwright train --nproc N` and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."


class RankAndSize(NamedTuple):
    """The rank of this process, and the number of processes of the run."""

    rank: int
    size: int


def rank_and_size() -> RankAndSize:
    """Returns rank and size from the launcher's variables, (0, 1) without a launcher; rejects contradictions."""
    size = _number("WORLD_SIZE", at_least=1)
    rank = _number("RANK", at_least=0)
    tasks = _number("SLURM_STEP_NUM_TASKS", at_least=1)
    if size is None and tasks is not None and tasks > 1:
        raise ConfigError(
            f"SLURM has started {tasks} separate tasks of this command: WORLD_SIZE is not set. "
            "`trainwright launch run.yaml --slurm nodes=N gpus=N` writes a job that connects them."
        )
    if size is None and rank:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is not set. {_LAUNCHERS} For one process unset RANK.")
    if size is None or (size == 1 and rank is None):
        return RankAndSize(0, 1)
    if rank is None:
        raise ConfigError(f"WORLD_SIZE is {size}, but RANK is not set. {_LAUNCHERS} For one process unset WORLD_SIZE.")
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0 to {size - 1}.")
    return RankAndSize(rank, size)


def world_size() -> int:
    """Returns the number of processes that the launcher started; 1 without a launcher."""
    return rank_and_size().size


def local_rank() -> int:
    """Returns this process's number on its machine; 0 without a launcher."""
    number = _number("LOCAL_RANK", at_least=0)
    if number is None and world_size() > 1:
        raise ConfigError(f"WORLD_SIZE is {world_size()}, but LOCAL_RANK is not set. {_LAUNCHERS}")
    return number or 0


def local_size() -> int:
    """Returns the number of this run's processes on its machine; 1 without a launcher."""
    return _number("LOCAL_WORLD_SIZE", at_least=1) or 1


def join(axes: Mapping[str, int], *, collectives: str, device_type: str, facts: RunFacts | None = None) -> Ranks:
    """Opens the process group if there are several processes, and returns the ranks.

    If `facts` (`facts_of`) differ between ranks, every rank raises the same error; None skips the comparison.
    """
    rank, size = rank_and_size()
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        store = _find_store(rank)
        # A unique name, because the launcher's store outlives the ranks and still has the keys of earlier ones.
        own_store = PrefixStore(f"trainwright/join-{meet(store, rank, size)}", store)
        if facts is not None:
            reject_other_runs(own_store, rank, size, facts)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        own_store.set_timeout(timeout)
        dist.init_process_group(collectives, store=own_store, rank=rank, world_size=size, timeout=timeout)
    # A separate group for objects and flags on the CPU, which must not wait for collectives of the device.
    control = dist.new_group(backend="gloo")
    mesh = lay_out(axes, device_type=device_type)
    return Ranks(dist.get_rank(), dist.get_world_size(), control=control, mesh=mesh)


def leave() -> None:
    """Closes the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _find_store(rank: int) -> TCPStore:
    """Connects to the store of the run; rank 0 creates it unless the launcher has."""
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", at_least=1)
    if not host or port is None:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {missing} is not. {_LAUNCHERS}")
    creates_it = rank == 0 and first_rank_keeps_notes()
    try:
        return TCPStore(
            host,
            port,
            is_master=creates_it,
            timeout=timedelta(seconds=ARRIVE_SECONDS),
            wait_for_workers=False,  # `meet` waits, and detects ranks that fail in the meantime
            multi_tenant=True,  # a process may join again
        )
    except RuntimeError as error:  # of the network
        if creates_it and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise ConfigError(
                f"MASTER_PORT: port {port} of this machine is in use, probably by another run. Use another port "
                "(torchrun: --master-port); `trainwright train --nproc N` chooses a free one."
            ) from error
        reason = str(error).partition("\n")[0][:200]
        raise TrainwrightError(
            f"Rank {rank} could not reach rank 0 at MASTER_ADDR {host}, MASTER_PORT {port}: {reason} "
            "Check that rank 0 is started, and that this machine can reach it."
        ) from error


def _number(name: str, *, at_least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name}: {text!r} is not a whole number from {at_least} on. {_LAUNCHERS}")
    return int(text)
