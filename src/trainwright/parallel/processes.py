"""Joins the processes of a run: the launcher's variables, the rendezvous, the process group, and consistency checks.

Settings, code and versions of all ranks are compared before anything is built. Of ranks that fail together, one error
is shown.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented there
from torch.distributed.distributed_c10d import PrefixStore, Store

from trainwright.config import RunConfig
from trainwright.errors import ConfigError, TrainwrightError
from trainwright.parallel.collectives import Ranks, text_of
from trainwright.parallel.mesh import lay_out
from trainwright.registry.builtin import KIND_FOLDERS

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


class RankFailure(NamedTuple):
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


def noted_failure(store: Store) -> RankFailure | None:
    """Returns the first failure that a rank has noted, or None; does not wait for one."""
    if not store.check([_key()]):
        return None
    note: Any = json.loads(store.get(_key()))
    return RankFailure(*note)


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


ARRIVE_SECONDS = 300.0
"""How long ranks may come after each other: imports from a slow disk take minutes on many machines."""

_HERE, _INVITATION, _ANSWERS, _OPEN = "here", "invitation", "answers", "open"
_POLL_SECONDS = (0.02, 0.5)  # the first and the longest pause; thousands of ranks ask one store


def meet(store: Store, rank: int, size: int, *, arrive_seconds: float = ARRIVE_SECONDS) -> str:
    """Waits until all ranks are here, and returns the name of the rendezvous, which no other one in the store has.

    A rank that does not come, or that fails meanwhile, is an error that names it, on every rank.
    """
    notes: Any = PrefixStore("trainwright/rendezvous", store)  # torch's stubs lack `append`
    if not _launcher_numbers_ranks():
        _reject_twins(store, rank)
    own = uuid.uuid4().hex
    notes.append(_HERE, f"{rank} {own}\n")
    if rank == 0:
        return _host(notes, store, own, size, arrive_seconds)
    rendezvous = ""

    def is_open() -> bool:
        nonlocal rendezvous
        if not rendezvous and notes.check([f"{_INVITATION}/{own}"]):
            rendezvous = text_of(notes.get(f"{_INVITATION}/{own}"))
            notes.add(f"{_ANSWERS}/{rendezvous}", 1)
        return bool(rendezvous) and notes.check([f"{_OPEN}/{rendezvous}"])

    # Rank 0 gives up first, and knows who is missing.
    if not _wait(is_open, store, rank, arrive_seconds + 10):
        raise TrainwrightError(f"Rank {rank} waited for rank 0 for {arrive_seconds + 10:.0f} s. Is it started?")
    return rendezvous


def _host(notes: Store, store: Store, own: str, size: int, arrive_seconds: float) -> str:
    """Invites until all have answered."""
    rendezvous = uuid.uuid4().hex
    invited: set[str] = set()
    missing: list[int] = []

    def has_all() -> bool:
        names = dict(line.split() for line in text_of(notes.get(_HERE)).splitlines())  # the last name of a rank counts
        missing[:] = [rank for rank in range(size) if str(rank) not in names]
        for name in set(names.values()) - invited - {own}:
            notes.set(f"{_INVITATION}/{name}", rendezvous)
            invited.add(name)
        return not missing and notes.add(f"{_ANSWERS}/{rendezvous}", 0) >= size - 1

    if not _wait(has_all, store, 0, arrive_seconds):
        shown = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        who = f"of rank {shown} there is no sign" if missing else "one of them has died"
        raise TrainwrightError(
            f"Not all {size} ranks have come within {arrive_seconds:.0f} s: {who}. Start them all, with the same "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE; what a rank that failed has said is in its own output."
        )
    notes.set(f"{_OPEN}/{rendezvous}", "1")
    return rendezvous


def _wait(is_done: Callable[[], bool], store: Store, rank: int, seconds: float) -> bool:
    """Asks until it is done or the time is over; a failure that another rank notes meanwhile is raised here too."""
    until, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    while time.monotonic() < until:
        try:
            if is_done():
                return True
            failure = None if _launcher_numbers_ranks() else noted_failure(store)
        except RuntimeError as error:  # the connection was closed
            raise TrainwrightError(
                f"Rank {rank} has lost the store of the run while the ranks were gathering: rank 0 or the launcher is "
                "gone. Its own output says why."
            ) from error
        if failure is not None and failure.rank != rank:
            raise TrainwrightError(f"Rank {failure.rank} failed at start-up: {failure.text}")
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_SECONDS[1])
    return False


def _reject_twins(store: Store, rank: int) -> None:
    """Two processes with one number: two runs share a port."""
    own = own_name()
    first = who_is(store, rank, name=own)
    if first != own:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"Two processes say that they are rank {rank} of the run at {address}: {first}, and this one, {own}. "
            "Two runs use the same MASTER_PORT: give one of them another."
        )


def _launcher_numbers_ranks() -> bool:
    """Does torch's launcher number the ranks and end them all when one fails? Its store outlives them, too."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


ANSWER_SECONDS = 25.0
"""How long a rank may take to answer once it has come. One that does not has died, and all are gone within 30 s."""

_MAX_FILES = 2000
"""So many files of a package are compared; hashing them takes a tenth of a second."""
_MAX_SHOWN = 3
_DIGITS_OF_A_CLOCK = 4  # hours and minutes
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class RunFacts:
    """What must be equal on all ranks, each as a name and a short text."""

    settings: Mapping[str, str]
    """The config's settings: dotted name → value as JSON."""
    code: Mapping[str, str]
    """Files → a hash of what is in them."""
    versions: Mapping[str, str]
    """Of Python and torch; trainwright is compared by its files."""


def facts_of(config: RunConfig) -> RunFacts:
    """Returns the facts of this process: what it was told to run, and with which code.

    The code is trainwright's own, what lies beside the YAML file and in its folders of components, and the packages
    that the config names.
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
    """Returns a run's name; without its digits where it may have been made of a clock, which ranks read apart.

    The first rank's is taken for all then (build.py).
    """
    return re.sub(r"\d", "0", name) if len(re.findall(r"\d", name)) >= _DIGITS_OF_A_CLOCK else name


def reject_other_runs(store: Store, rank: int, size: int, facts: RunFacts) -> None:
    """Raises the same error on every rank if any has other facts than the first; every rank must call it."""
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    own = {"size": {"WORLD_SIZE": str(size)}, **asdict(facts)}
    if rank == 0:
        store.set("facts", json.dumps(own))
        verdicts = _collect(store, [f"verdict/{other}" for other in range(1, size)])
        store.set("verdict", next(filter(None, verdicts), ""))
    else:
        first = json.loads(_wait_for(store, "facts", "Rank 0"))
        store.set(f"verdict/{rank}", _difference(first, own, rank))
    verdict = _wait_for(store, "verdict", "Rank 0")
    if verdict:
        store.set(f"received/{rank}", "1")
        if rank == 0:  # it may keep the store, and must not leave before the others have read it
            _collect(store, [f"received/{other}" for other in range(1, size)])
        raise RaisedByAll(verdict)


def _difference(first: Mapping[str, Mapping[str, str]], own: Mapping[str, Mapping[str, str]], rank: int) -> str:
    """Says how this rank differs from the first, or nothing if it does not."""
    who = f"Rank {rank} (on {socket.gethostname()})"
    for kind, advice in (
        ("size", "Every rank needs the same WORLD_SIZE; another run may be using this MASTER_PORT."),
        ("versions", "Use the same environment on every machine."),
        ("settings", "Start every rank with the same file and the same overrides."),
        ("code", "Give every machine the same files, or a shared folder."),
    ):
        names = sorted(first[kind].keys() | own[kind].keys())
        different = [name for name in names if first[kind].get(name) != own[kind].get(name)]
        if not different:
            continue
        if kind == "code":
            shown = [f"{name} {_absence(first[kind], own[kind], name)}" for name in different[:_MAX_SHOWN]]
        else:
            shown = [
                f"{name} is {own[kind].get(name, 'not set')}, on rank 0 {first[kind].get(name, 'not set')}"
                for name in different[:_MAX_SHOWN]
            ]
        rest = f"; and {len(different) - _MAX_SHOWN} more" if len(different) > _MAX_SHOWN else ""
        what = {"settings": "other settings", "code": "other code"}.get(kind, "another environment")
        return f"{who} has {what} than rank 0: {'; '.join(shown)}{rest}. {advice}"
    return ""


def _absence(first: Mapping[str, str], own: Mapping[str, str], name: str) -> str:
    if name not in own:
        return "is missing"
    return "differs" if name in first else "is not on rank 0"


def _collect(store: Store, keys: Sequence[str]) -> list[str]:
    return [_wait_for(store, key, f"Rank {key.rpartition('/')[2]}") for key in keys]


def _wait_for(store: Store, key: str, who: str) -> str:
    try:
        return str(store.get(key), "utf-8")
    except RuntimeError as error:  # of torch: a timeout, or a connection that was closed
        raise TrainwrightError(
            f"{who} came and then did not answer within {ANSWER_SECONDS:.0f} s: it has died at start-up. "
            "Its own output says why."
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
    """The files and modules that the config takes classes from, and those that it imports."""

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
    """Hashes of a file that a config names, or of the package of a module that it names."""
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
        return {}  # whoever imports it says what is wrong
    if found is None or found.origin is None:
        return {}
    if found.submodule_search_locations is None:
        return {top: _hash(Path(found.origin))}
    return {f"{top}/{file}": digest for file, digest in _hashes(Path(found.origin).parent, "**/*.py")}


COLLECTIVE_SECONDS = 30 * 60
"""How long a collective may take before torch gives up. Who is stuck is found sooner, by hooks/watchdog.py."""

_WHO_SETS_THEM = (
    "`trainwright train --nproc N` and torchrun set RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
)


class RankAndSize(NamedTuple):
    """This process's number among the processes of the run, and how many there are."""

    rank: int
    size: int


def rank_and_size() -> RankAndSize:
    """Returns what the launcher's variables say, (0, 1) without any; what contradicts itself is rejected."""
    size = _number("WORLD_SIZE", at_least=1)
    rank = _number("RANK", at_least=0)
    tasks = _number("SLURM_STEP_NUM_TASKS", at_least=1)
    if size is None and tasks is not None and tasks > 1:
        raise ConfigError(
            f"SLURM has started {tasks} tasks of this command, and none knows of the others: WORLD_SIZE is not set. "
            "`trainwright launch run.yaml --slurm nodes=N gpus=N` writes a job that starts them together."
        )
    if size is None and rank:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is not set. {_WHO_SETS_THEM} For one process unset RANK.")
    if size is None or (size == 1 and rank is None):
        return RankAndSize(0, 1)
    if rank is None:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but RANK is not set. {_WHO_SETS_THEM} For one process unset WORLD_SIZE."
        )
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks are numbered from 0 to {size - 1}.")
    return RankAndSize(rank, size)


def world_size() -> int:
    """Returns the number of processes that the launcher started, 1 without one."""
    return rank_and_size().size


def local_rank() -> int:
    """Returns this process's number on its machine, 0 without a launcher."""
    number = _number("LOCAL_RANK", at_least=0)
    if number is None and world_size() > 1:
        raise ConfigError(f"WORLD_SIZE is {world_size()}, but LOCAL_RANK is not set. {_WHO_SETS_THEM}")
    return number or 0


def local_size() -> int:
    """Returns the number of this run's processes on its machine, 1 without a launcher."""
    return _number("LOCAL_WORLD_SIZE", at_least=1) or 1


def join(axes: Mapping[str, int], *, collectives: str, device_type: str, facts: RunFacts | None = None) -> Ranks:
    """Opens the process group where there are several processes, and returns this process's place in it.

    `facts` (same_run.facts_of) must be equal on all ranks, or every rank raises the same error; None: nothing is
    compared.
    """
    rank, size = rank_and_size()
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        store = _find_store(rank)
        # A name that no other join has had: the launcher's store outlives the ranks, and holds what earlier ones left.
        own_store = PrefixStore(f"trainwright/join-{meet(store, rank, size)}", store)
        if facts is not None:
            reject_other_runs(own_store, rank, size, facts)
        timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        own_store.set_timeout(timeout)
        dist.init_process_group(collectives, store=own_store, rank=rank, world_size=size, timeout=timeout)
    # A group of its own for objects and flags on the CPU: it must never queue behind a device's collectives.
    control = dist.new_group(backend="gloo")
    mesh = lay_out(axes, device_type=device_type)
    return Ranks(dist.get_rank(), dist.get_world_size(), control=control, mesh=mesh)


def leave() -> None:
    """Closes the process group, where there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _find_store(rank: int) -> TCPStore:
    """Connects to the store of the run; without a launcher that keeps it, the first rank does."""
    host, port = os.environ.get("MASTER_ADDR"), _number("MASTER_PORT", at_least=1)
    if not host or port is None:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise ConfigError(f"RANK and WORLD_SIZE are set, but {missing} is not. {_WHO_SETS_THEM}")
    keeps_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            host,
            port,
            is_master=keeps_it,
            timeout=timedelta(seconds=ARRIVE_SECONDS),
            wait_for_workers=False,  # rendezvous waits, and hears of ranks that fail meanwhile
            multi_tenant=True,  # a process that joins again finds its own
        )
    except RuntimeError as error:  # what torch raises for the network
        if keeps_it and ("EADDRINUSE" in str(error) or "in use" in str(error)):
            raise ConfigError(
                f"MASTER_PORT: port {port} of this machine is taken, probably by another run. Give this one another "
                "(torchrun: --master-port); `trainwright train --nproc N` finds a free one by itself."
            ) from error
        raise TrainwrightError(
            f"Rank {rank} could not reach rank 0 at MASTER_ADDR {host}, MASTER_PORT {port}: {_first_line(error)} "
            "Is rank 0 started, and can this machine reach that one?"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _number(name: str, *, at_least: int) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name}: {text!r} is not a whole number from {at_least} on. {_WHO_SETS_THEM}")
    return int(text)
