"""Reads the weights of a folder in Hugging Face's layout into a module, shard by shard.

The peak of memory is the model plus one shard: a module on the meta device gets its weights one file after the other.
Which key belongs to which parameter is key_map.py's; writing is saving.py's; finding the folder is locate.py's.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.config.tree import shown_path
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
SECTION_FILE = "model.yaml"
"""The model section of a run, beside weights that were exported under their own names, without a config.json."""
RUN_FILE = "config.yaml"
"""What a run folder has."""

NUM_COPIES = 4
"""How many weights are copied at the same time."""

_DISTRIBUTIONS = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "poisson")
_NUMBERS = ("rand", "randint", "randn", "random", "randperm", "uniform", "trunc_normal", "dropout", "native_dropout")
DRAWS = frozenset(f"{name}{end}" for name in _DISTRIBUTIONS + _NUMBERS for end in ("", "_", "_like"))
"""The names of torch's functions that draw numbers; those with a line at the end change the tensor that they get."""

Getter = Callable[[str], Tensor]
"""Gives the tensor of a key."""


class Source(NamedTuple):
    """Where a weight of ours stands in a file, and whether it stands there transposed."""

    key: str
    transpose: bool


@dataclass(frozen=True)
class LoadReport:
    """What did not fit between a module and the files that it was loaded from; both are sorted."""

    missing: tuple[str, ...]
    """Our names of weights that the files lack; they were drawn anew (or kept, in a module that had some)."""
    unexpected: tuple[str, ...]
    """Keys of the files that the module has no weights for; they were left out."""


class DrawNothing(TorchFunctionMode):
    """Leaves weights on the meta device alone that are to be drawn: torch would import its compiler for it, seconds.

    `has_drawn` says whether anything else was drawn inside. (The generators' states would not tell: whoever builds a
    model may put them back.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in DRAWS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if function.__name__.endswith("_") and isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
            self.has_drawn = True
        return function(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Makes modules inside without memory, on the meta device, as `torch.device("meta")` does, but at once."""
    with torch.device("meta"), DrawNothing():
        yield


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns a dtype for its name (`bf16`, `bfloat16`, `fp32`, ...); a dtype and None are returned as they are."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found: Any = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(dtype)
    found = getattr(torch, str(dtype), None) if found is None else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"{dtype!r} is no dtype of weights. Use bf16, fp16 or fp32.", where="dtype")
    return found


def read_config_file(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is no model folder: it has no {CONFIG_FILE}. {_advice(folder)}")
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object with a model's settings.")
    return content


def _advice(folder: Path) -> str:
    """Says how to come by a model folder, by what this one is instead."""
    shown = shown_path(folder)
    if (folder / RUN_FILE).is_file():
        return f"It is a run. Write its model with `trainwright export {shown} --to FOLDER`, and give that folder."
    if folder.parent.name == "checkpoints" and (folder.parent.parent / RUN_FILE).is_file():
        return f"It is a checkpoint. Write it with `trainwright export {shown} --to FOLDER`, and give that folder."
    if (folder / SECTION_FILE).is_file():
        return (
            "It holds weights under their own names (trainwright export --format safetensors). Export the run to "
            "another folder without --format."
        )
    return "Give a folder that save_pretrained or `trainwright export` wrote."


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file; a damaged one is named."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy the model again.") from error


def load_weights(
    model: nn.Module,
    folder: Path,
    *,
    key_map: KeyMap | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    allow_pickle: bool = False,
) -> LoadReport:
    """Gives a module, which may be on the meta device, the weights of a folder; returns what did not fit.

    Each weight keeps its file's dtype unless `dtype` is given. Tied weights are read once. With `strict`, missing and
    unexpected keys are one error that lists them, raised before any weight is read; otherwise they are logged, and
    what is missing in a module on the meta device is drawn by its `reset_parameters`.
    """
    files = weight_files(folder, allow_pickle=allow_pickle)
    keys = {key: path for path in files for key in keys_of(path)}
    plan, report = _plan(model, list(keys), key_map)
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(_describe(report, folder) + " Choose another model, or load with strict=False.")
    ties = shared_names(model)
    _draw_missing(model, report.missing, ties=ties, device=device, dtype=dtype)
    copy = partial(_owned, dtype=dtype, device=device)
    # Copies touch fresh memory, page by page, which one thread alone does far below the memory's speed.
    with ThreadPoolExecutor(NUM_COPIES) as pool:
        for path in files:
            here = {name: source for name, source in plan.items() if keys[source.key] == path}
            with open_weights(path) as get:
                mapped = [get(source.key) for source in here.values()]
                for (name, source), tensor in zip(here.items(), mapped, strict=True):
                    _check_shape(model, name, source, tensor, path)
                for name, tensor in zip(here, pool.map(copy, mapped, here.values()), strict=True):
                    place(model, ties.get(name, (name,)), tensor)
                del mapped, tensor
    if report.missing or report.unexpected:
        logger.warning(_describe(report, folder))
    return report


def compare_keys(
    model: nn.Module, folder: Path, *, key_map: KeyMap | None = None, allow_pickle: bool = False
) -> LoadReport:
    """Returns what does not fit between a module and a folder's files, of which the keys alone are read."""
    files = weight_files(folder, allow_pickle=allow_pickle)
    return _plan(model, [key for path in files for key in keys_of(path)], key_map)[1]


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Returns the files that hold a folder's weights; a folder without any, or with pickles only, is refused."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _files_of_index(folder / INDEX_FILE)
    pickles = [folder / name for name in (PICKLED_FILE, PICKLED_INDEX_FILE) if (folder / name).is_file()]
    if not pickles:
        problem = f"{folder} holds no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE} is there."
        raise CheckpointError(f"{problem} {_advice(folder)}")
    if not allow_pickle:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which may run any program when it is read. Convert it to safetensors, or, if "
            "you trust its origin, pass allow_pickle=True (in a run file, model.pretrained: {folder: …, "
            "allow_pickle: true})."
        )
    return pickles if pickles[0].name == PICKLED_FILE else _files_of_index(pickles[0])


def _files_of_index(index: Path) -> list[Path]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from keys to files. Copy the model again.")
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} names {len(names)} files, of which {', '.join(absent)} are not there. Copy the model again."
        )
    return [index.parent / name for name in names]


@contextmanager
def open_weights(path: Path) -> Iterator[Getter]:
    """Opens a file of weights; a damaged one is named. What the getter gives may be lost when the file is closed."""
    if path.suffix != ".safetensors":
        from trainwright.models.pickled import read_pickled

        yield read_pickled(path).__getitem__
        return
    with _opened(path) as file:
        yield file.get_tensor


def keys_of(path: Path) -> list[str]:
    """Returns the keys of a file of weights; of a safetensors file only the header is read."""
    if path.suffix != ".safetensors":
        from trainwright.models.pickled import read_pickled

        return list(read_pickled(path))
    with _opened(path) as file:
        return list(file.keys())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is damaged or cut short; copy it again.") from error


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Maps each name of a tied weight to all of its names, the one that files keep first."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_tensor.values() if len(names) > 1 for name in names}


def _plan(model: nn.Module, keys: Sequence[str], key_map: KeyMap | None) -> tuple[dict[str, Source], LoadReport]:
    """Decides where each of our weights comes from; a tied one comes from the first of its names that is there."""
    found = {name: Source(*source) for name, source in (key_map or KeyMap()).ours_in(keys).items()}
    ties = shared_names(model)
    plan: dict[str, Source] = {}
    missing = []
    for name in model.state_dict(keep_vars=True):
        names = ties.get(name, (name,))
        if name != names[0]:
            continue
        present = next((one for one in names if one in found), None)
        if present is None:
            missing.append(name)
        else:
            plan[name] = found[present]
    known = set(model.state_dict(keep_vars=True))
    unexpected = sorted(source.key for name, source in found.items() if name not in known)
    return plan, LoadReport(missing=tuple(sorted(missing)), unexpected=tuple(unexpected))


def _describe(report: LoadReport, folder: Path) -> str:
    parts = []
    if report.missing:
        parts.append(f"{len(report.missing)} weights of the model are missing ({listed(report.missing)})")
    if report.unexpected:
        parts.append(f"{len(report.unexpected)} keys belong to no weight ({listed(report.unexpected)})")
    return f"{folder} does not fit the model: {'; '.join(parts)}."


def listed(names: Sequence[str], *, at_most: int = 20) -> str:
    """Returns names with commas between them, the first ones where there are many; `none` where there are none."""
    more = f", and {len(names) - at_most} more" if len(names) > at_most else ""
    return (", ".join(names[:at_most]) + more) or "none"


def _draw_missing(
    model: nn.Module,
    missing: tuple[str, ...],
    *,
    ties: Mapping[str, tuple[str, ...]],
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> None:
    state = model.state_dict(keep_vars=True)
    absent = [name for name in missing if state[name].is_meta]
    for name in missing:
        if dtype is not None and name not in absent and state[name].is_floating_point():
            # As the weights beside them are: a layer does not take another's dtype.
            place(model, ties.get(name, (name,)), state[name].detach().to(dtype))
    if not absent:
        return
    for name in absent:
        drawn_dtype = dtype if dtype is not None and state[name].is_floating_point() else state[name].dtype
        empty = torch.empty(state[name].shape, dtype=drawn_dtype, device=device)
        place(model, ties.get(name, (name,)), empty)
    # Everything else is still on the meta device, where drawing costs nothing.
    model.reset_parameters()  # type: ignore[operator]


def _check_shape(model: nn.Module, name: str, source: Source, tensor: Tensor, path: Path) -> None:
    owner, leaf = _owner(model, name)
    wanted = tuple(getattr(owner, leaf).shape)
    shape = tuple(tensor.shape)
    got = shape[::-1] if source.transpose else shape
    if got != wanted:
        stored = " (stored transposed)" if source.transpose else ""
        raise CheckpointError(
            f"{path}: {source.key} has the shape {shape}{stored}, but the model's {name} has {wanted}. "
            "The model's sizes are not those of the files: leave out the settings that change them, or choose another "
            "folder."
        )


def _owned(tensor: Tensor, source: Source, *, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Returns a copy of a file's tensor: what is mapped from the file must not live longer than the file."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    tensor = tensor.t() if source.transpose else tensor
    return tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)


def place(model: nn.Module, names: tuple[str, ...], tensor: Tensor) -> None:
    """Makes a tensor the weight of all the names; a parameter keeps its attributes (`no_weight_decay`, ...)."""
    owner, leaf = _owner(model, names[0])
    weight = getattr(owner, leaf)
    if not isinstance(weight, nn.Parameter):
        owner._buffers[leaf] = tensor
        return
    if weight.is_meta:
        parameter = nn.Parameter(tensor, requires_grad=weight.requires_grad)
        parameter.__dict__.update(weight.__dict__)
        weight = parameter
    else:
        weight.data = tensor
    for name in names:
        owner, leaf = _owner(model, name)
        owner._parameters[leaf] = weight


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
