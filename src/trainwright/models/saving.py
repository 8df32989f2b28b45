"""Writes a module as a folder in Hugging Face's format: config.json and safetensors, in shards if it is large.

A model whose outputs differ from those of its published class is rejected with the reason.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap
from trainwright.models.pretrained import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLED_FILE,
    PICKLED_INDEX_FILE,
    WEIGHTS_FILE,
    on_meta,
    shared_names,
)
from trainwright.models.transformers_kernels import FusedForward
from trainwright.progress import progress

if TYPE_CHECKING:
    from trainwright.models.model import Model

# Attributes of a class that do not change its outputs: construction, initialization, display, files, generation.
NOT_COMPUTING = (
    "__init__", "__init_subclass__", "__new__",
    "_init_weights", "init_weights", "post_init", "reset_parameters", "disable_untrainable_params",
    "extra_repr", "__repr__", "_get_name", "train", "gradient_checkpointing_enable", "generate",
    "key_map", "hugging_face_type", "settings_from_hugging_face", "to_hugging_face", "unwritten",
    "from_config", "from_preset", "from_pretrained", "load_pretrained", "save_pretrained", "state_dict",
)  # fmt: skip

# Plain attributes of the training, or of the last call, that do not change the outputs.
NOT_DECIDING = re.compile(r"_.*|training|.*dropout.*|.*gradient_checkpointing.*|loss_type|name_or_path|.*_cached")

OWN_HOOKS = ("trainwright", "transformers", "accelerate")
"""Packages whose hooks do not change the outputs."""


def changes_of(model: Model) -> list[str]:
    """Describes what transformers would compute differently; empty for an unchanged shipped model.

    The model is compared with a new one of the class that defines `hugging_face_architectures`: a subclass that defines
    them itself is responsible for its outputs. Compares methods, sub-modules, their hooks and plain attributes, and
    names and shapes of weights. The criterion may be any.
    """
    published = next(one for one in type(model).__mro__ if "hugging_face_architectures" in vars(one))
    known = inspect.signature(published).parameters
    with on_meta():
        twin = published(**{key: value for key, value in model.settings.items() if key in known})
    return _differences(model, twin)


def changes_of_theirs(model: nn.Module) -> list[str]:
    """Does the same for a model of transformers, with a new one from its config.

    A class with its own config class has its own name in config.json, and is responsible for its outputs.
    """
    kind: Any = type(model)
    published = next((one for one in kind.__mro__ if _is_theirs(one)), kind)
    if not _is_theirs(kind) and not _is_theirs(kind.config_class):
        return []
    config: Any = model.config
    try:
        with on_meta():
            twin: nn.Module = published._from_config(copy.deepcopy(config))
    except (RuntimeError, NotImplementedError):  # a constructor that computes with its weights
        with torch.random.fork_rng(devices=[]):
            twin = published._from_config(copy.deepcopy(config))
    return _differences(model, twin)


def _differences(model: nn.Module, twin: nn.Module) -> list[str]:
    found = list(_changed_modules(model, twin))
    ours, theirs = (
        {name: str(list(one.shape)) for name, one in each.state_dict(keep_vars=True).items() if not _is_criterion(name)}
        for each in (model, twin)
    )
    explained = tuple(f"{one.partition(' ')[0]}." for one in found)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name) and not name.startswith(explained):
            shapes = [each.get(name, "absent") for each in (ours, theirs)]
            found.append(f"{name} is {shapes[0]}, not {shapes[1]}")
    return found


def _changed_modules(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    """Describes the outermost modules whose outputs differ from those of the new model."""
    parts, expected = (dict(each.named_modules(remove_duplicate=False)) for each in (model, twin))
    changed: list[str] = []
    for name in expected:
        if _is_criterion(name) or any(name.startswith(f"{outer}.") for outer in changed):
            continue
        problem = f"{name} is missing" if name not in parts else _difference(name, parts[name], expected[name])
        if problem is not None:
            yield problem
            if name:
                changed.append(name)


def _difference(name: str, part: nn.Module, expected: nn.Module) -> str | None:
    """Describes how the outputs of a module would differ from those of the expected one; None if they would not."""
    kind, other = getattr(type(part), "evaluates_as", type(part)), type(expected)  # a layer that trains in fp8
    shown = name or kind.__name__
    # accelerate also replaces the forward of an object, to cast inputs, and keeps the original.
    own = vars(part).get("forward")
    if own is not None and not isinstance(own, FusedForward) and not hasattr(part, "_original_forward"):
        return f"{shown} has another forward"
    replaced = _replaced(kind, other)
    if replaced is not None and not name:
        return f"{kind.__name__}.{replaced} replaces that of {other.__name__}"
    if replaced is not None:
        what = "" if replaced == "forward" else f", whose {replaced} it replaces"
        return f"{name} is a {kind.__name__}, not a {other.__name__}{what}"
    if _hooks(part) != _hooks(expected):
        return f"{shown} has hooks that may change its inputs or outputs: {', '.join(_hooks(part)) or 'none'}"
    if isinstance(part, nn.Dropout):
        return None
    if part.extra_repr() != expected.extra_repr():
        return f"{shown} is {kind.__name__}({part.extra_repr()}), not ({expected.extra_repr()})"
    for attribute, value in vars(expected).items():
        if _is_plain(value) and not NOT_DECIDING.fullmatch(attribute):
            got = getattr(part, attribute, None)
            if not (got == value or got is value):
                return f"{shown} has {attribute} {got!r}, not {value!r}"
    return None


def _replaced(kind: type[Any], published: type[Any]) -> str | None:
    """Returns the name of an attribute that affects the outputs and differs between the classes; None without one."""
    if kind is published:
        return None
    names = dict.fromkeys(name for one in published.__mro__ if one is not object for name in vars(one))
    for name in ("forward", *names):
        if name in NOT_COMPUTING:
            continue
        ours, theirs = (inspect.getattr_static(each, name, None) for each in (kind, published))
        is_value = _is_plain(theirs) and not NOT_DECIDING.fullmatch(name)
        decides = hasattr(theirs, "__get__") or is_value  # functions, properties and similar objects have it
        if decides and ours is not theirs and not (is_value and ours == theirs):
            return name
    return None


def _hooks(module: nn.Module) -> list[str]:
    """Returns the names of forward hooks that are not from OWN_HOOKS."""
    every = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    named = [one if hasattr(one, "__qualname__") else type(one) for one in every]
    return [one.__qualname__ for one in named if str(one.__module__).partition(".")[0] not in OWN_HOOKS]


def _is_plain(value: Any) -> bool:
    """Returns True for values that can be compared: numbers, text, named functions, and tuples of them."""
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return "<" not in value.__qualname__
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _is_criterion(name: str) -> bool:
    return name.partition(".")[0] == "criterion"


def _is_theirs(kind: Any) -> bool:
    return str(kind.__module__).partition(".")[0] == "transformers"


try:
    import fcntl
except ImportError:  # not POSIX: a dead writer cannot be detected, and nothing is removed
    fcntl = None  # type: ignore[assignment]

SETTINGS = (CONFIG_FILE, "adapter_config.json")
"""The files that make a folder a model's or an adapter's."""

SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_folder(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    *,
    key_map: KeyMap | None = None,
    max_shard_bytes: int = 5_000_000_000,
    leave_out: Collection[str] = (),
) -> Path:
    """Writes a model's config.json, with its dtype, and its weights; returns the folder.

    The files of an existing model folder are replaced. A folder that is neither empty nor a model's is rejected.
    `leave_out` are names of sub-modules whose weights are not written.
    """
    check_target(folder)
    if not is_model_folder(folder) and has_files_of_others(folder):
        raise CheckpointError(
            f"{folder} has files and is not a model folder, so nothing is written there. Use another, or empty it."
        )
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    with staged(folder, replaces=model_files(folder)) as staging:
        write_json(staging / CONFIG_FILE, {**config, "dtype": str(dtype).removeprefix("torch.")})
        options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "leave_out": leave_out}
        write_weights(model, staging, key_map=key_map or KeyMap(), **options)
    return folder


@contextmanager
def staged(folder: Path, *, replaces: Collection[str] = (), first: str | None = None) -> Iterator[Path]:
    """Yields an empty folder for files that are moved to `folder` at the end; after an error, nothing is changed.

    An existing folder loses the files in `replaces` and keeps all others that were not written again. The written file
    `first` is moved before any other file is removed or moved.
    """
    check_target(folder)
    exists = folder.is_dir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    stale = abandoned(folder)
    # Inside an existing folder, which may be a mount or a link, because a move within it is fast.
    place = folder if exists else folder.parent
    staging = place / f".{folder.name}.writing-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        with _held(staging):
            with progress(f"Writing {folder.name}"):
                yield staging
            if exists:
                _move_in(staging, folder, replaces, first)
            else:
                staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for left in stale:  # only now, because until then they show that the files next to them are incomplete
        if left.is_dir() and not _is_held(left):
            shutil.rmtree(left, ignore_errors=True)


def abandoned(folder: Path) -> list[Path]:
    """Returns leftover staging folders of killed writers of this folder, in it or next to it."""
    if fcntl is None:
        return []
    places = [place for place in (folder, folder.parent) if place.is_dir()]
    found = [path for place in places for path in place.glob(f"{escape(f'.{folder.name}.writing-')}*")]
    return [path for path in found if not path.is_symlink() and path.is_dir() and not _is_held(path)]


def has_files_of_others(folder: Path) -> bool:
    """Returns True for a folder with files other than those of a killed writer."""
    return folder.is_dir() and any(folder.iterdir()) and not any(one.parent == folder for one in abandoned(folder))


def check_target(folder: Path) -> None:
    """Rejects a path that is a file."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a model is written as a folder. Use another path.")


def write_weights(
    model: nn.Module, folder: Path, *, key_map: KeyMap, max_shard_bytes: int, leave_out: Collection[str] = ()
) -> None:
    """Writes the weights under the files' keys: one safetensors file, or shards with an index; tied ones once.

    Peak memory is the model plus one shard, which may be copied (from a device, or transposed).
    """
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes is {max_shard_bytes}. Use a number of bytes, such as 5000000000.")
    state = model.state_dict()
    ties = shared_names(model)
    kept = [name for name in state if not name.startswith(tuple(f"{one}." for one in leave_out))]
    names = [name for name in kept if name == ties.get(name, (name,))[0]]
    shards = split_into_shards({name: state[name].nbytes for name in names}, max_bytes=max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in shard:
            key, transpose = key_map.to_theirs(name)
            tensors[key] = as_stored(state[name], transpose=transpose)
            weight_map[key] = file
        write_tensors(tensors, folder / file)
    if len(shards) > 1:
        total = {"total_size": sum(state[name].nbytes for name in names)}
        write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": dict(sorted(weight_map.items()))})


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file and syncs it to the disk."""
    save_file(tensors, path, metadata={"format": "pt"})
    # The library creates files that only their owner can read; they get the folder's permissions.
    path.chmod(path.parent.stat().st_mode & 0o666)
    _sync(path)


def split_into_shards(sizes: Mapping[str, int], *, max_bytes: int) -> list[list[str]]:
    """Groups names, in order, into shards of at most `max_bytes`; a larger weight is a shard by itself."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes an indented JSON file with sorted keys and syncs it to the disk."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)


def as_stored(tensor: Tensor, *, transpose: bool = False) -> Tensor:
    """Returns a tensor in the form of files: on the CPU and contiguous; copied only if needed."""
    if tensor.is_meta:
        raise CheckpointError(
            "The model is on the meta device and has no weights to write. Load or initialize them first."
        )
    return (tensor.t() if transpose else tensor).cpu().contiguous()


def is_model_folder(folder: Path) -> bool:
    """Returns True if a folder has a model: its settings and weights."""
    weights = (WEIGHTS_FILE, INDEX_FILE, PICKLED_FILE, PICKLED_INDEX_FILE)
    return (folder / CONFIG_FILE).is_file() and any((folder / name).is_file() for name in weights)


def model_files(folder: Path) -> set[str]:
    """Returns the names of a folder's files that belong to a model, as written here."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return {name for name in names if name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE) or SHARD_NAME.fullmatch(name)}


def _move_in(staging: Path, folder: Path, replaces: Collection[str], first: str | None) -> None:
    """Moves files into an existing folder: settings are removed first and moved last, as a model needs them."""
    written = [path.name for path in staging.iterdir()]
    for name in written:
        if (folder / name).is_dir():
            raise CheckpointError(f"{folder / name} is a folder, but a file of that name must be written. Rename it.")
    if first is not None:
        written.remove(first)
        (staging / first).replace(folder / first)
    for name in sorted({*written, *replaces} - {first}, key=lambda name: name not in SETTINGS):
        (folder / name).unlink(missing_ok=True)
    for name in sorted(written, key=lambda name: name in SETTINGS):
        (staging / name).rename(folder / name)
    staging.rmdir()


@contextmanager
def _held(staging: Path) -> Iterator[None]:
    """Locks a folder while its writer is alive; the system releases the lock when the process ends for any reason."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(staging, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks, where _is_held returns True
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits: _is_held takes the lock for a moment
        yield
    finally:
        os.close(descriptor)


def _is_held(staging: Path) -> bool:
    """Returns True if the writer of this folder may be alive."""
    with contextlib.suppress(OSError):
        descriptor = os.open(staging, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return False
    return True


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
