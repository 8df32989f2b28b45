"""Pretrained weights: finds the folder of a model and reads its weights, shard by shard.

Folders have Hugging Face's layout. Pickled weights are read only here, and only with the user's permission.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trainwright.config.problems import describe
from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.key_map import KeyMap
from trainwright.progress import progress
from trainwright.tracebacks import shown_path

logger = logging.getLogger(__name__)


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a `pytorch_model.bin`; a file with anything else is rejected.

    `weights_only` builds only tensors and plain containers, so that a malicious file cannot run a program. Files from
    before torch 1.6 are not zip archives and cannot be memory-mapped, so they are read into memory.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except Exception as error:  # damaged files raise errors of many kinds
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(f"{path} has a {type(content).__name__}, not a mapping of names to tensors.")
    return content


HOME_VARIABLE = "TRAINWRIGHT_HOME"
_FILE_NAME = re.compile(r"[^/\\\0]{1,255}")
HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
WANTED_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*", "*.txt")
"""The files that are downloaded from the hub: no pickles and no weights of other frameworks."""


def find_folder(name_or_folder: str | Path, *, home_path: str | Path | None = None) -> Path:
    """Returns the folder of a model: the given one, or the local or downloaded one of a name.

    A name (`org/name`) is searched in `home_path`, or without one in $TRAINWRIGHT_HOME
    (default ~/.cache/trainwright/models) and in Hugging Face's cache, then on the hub.
    """
    given = Path(name_or_folder).expanduser()
    if given.is_dir():
        return given
    if given.is_file():
        raise CheckpointError(f"{given} is a file. Use the folder with a model's {CONFIG_FILE} and weights.")
    homes = home_folders() if home_path is None else [Path(home_path).expanduser()]
    name = str(name_or_folder)
    if not HUB_NAME.fullmatch(name):
        raise CheckpointError(f"There is no folder {given}, and {name!r} is not the name of a model (org/name).")
    for home in homes:
        # Plain folders, and snapshots in the layout of Hugging Face's cache.
        repository = home / f"models--{name.replace('/', '--')}"
        reference = repository / "refs" / "main"
        snapshot = reference.read_text("utf-8").strip() if reference.is_file() else ""
        for folder in (home / name, repository / "snapshots" / snapshot):
            if (folder / CONFIG_FILE).is_file():
                return folder
    return _download(name, homes)


def home_folders() -> list[Path]:
    """Returns the folders in which models are searched by name, in this order."""
    own = os.environ.get(HOME_VARIABLE)
    cache = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    return [
        Path(own).expanduser() if own else Path("~/.cache/trainwright/models").expanduser(),
        Path(os.environ.get("HF_HUB_CACHE") or cache / "hub"),
    ]


def _download(name: str, homes: list[Path]) -> Path:
    looked = f"There is no folder {name}, and no model of that name in {' or '.join(str(home) for home in homes)}"
    if find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{looked}. To download it, `pip install 'trainwright[huggingface_hub]'`.")
    from huggingface_hub import snapshot_download

    try:
        with progress(f"Downloading {name}"):
            return Path(snapshot_download(name, allow_patterns=list(WANTED_FILES)))
    except Exception as error:  # of various types: no network, unknown name, no permission, no disk space
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given").rstrip(".")
        raise CheckpointError(f"{looked}, and the download failed: {type(error).__name__}: {first}.") from error


CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
PICKLED_INDEX_FILE = "pytorch_model.bin.index.json"
OTHER_CONFIG_FILE = "model_config.json"
"""SwissArmyTransformer's config.json."""
SECTION_FILE = "model.yaml"
"""The model section of a run, next to weights that were exported under our names, without a config.json."""
RUN_FILE = "config.yaml"
"""The config of a run folder."""

NUM_COPIES = 4
"""The number of weights that are copied in parallel."""

DRAWS = (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "trunc_normal_",
    "uniform_",
)  # fmt: skip
"""The names of torch's functions that fill their tensor with random numbers."""


class Source(NamedTuple):
    """The key of a weight in a file, and whether it is transposed there."""

    key: str
    transpose: bool


@dataclass(frozen=True)
class LoadReport:
    """The differences between a module and the files that it was loaded from, sorted."""

    missing: tuple[str, ...]
    """Names of weights that the files lack; they were initialized (or kept, in a module with memory)."""
    unexpected: tuple[str, ...]
    """Keys of the files without a weight in the module; they were ignored."""


class _DrawNothing(TorchFunctionMode):
    """Skips random initialization on the meta device, for which torch would import its compiler (which takes
    seconds)."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in DRAWS:
            tensor = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return function(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Creates modules on the meta device, like `torch.device("meta")` but faster."""
    with torch.device("meta"), _DrawNothing():
        yield


class DrawNarrow(TorchFunctionMode):
    """Creates weights in 16 bits with the same random numbers as in fp32, rounded.

    A model of 8 billion weights never needs 32 GB, because each weight is in fp32 only while it is drawn. For classes
    that initialize their weights only with draws and constants (`Model.draws_plainly`).
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._buffer = torch.empty(0)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("dtype") is None:
            return function(*args, **{**kwargs, "dtype": self._dtype})
        # The functions of torch.nn.init call a mode with keywords, before their `no_grad`.
        tensor = args[0] if args else kwargs.get("tensor")
        is_draw = getattr(function, "__name__", "") in DRAWS
        if is_draw and isinstance(tensor, Tensor) and tensor.dtype == self._dtype and not tensor.is_meta:
            if self._buffer.numel() < tensor.numel():  # reused, because the first access to new memory is slow
                self._buffer = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            wide = self._buffer[: tensor.numel()].view(tensor.shape)
            drawn = function(wide, *args[1:], **kwargs) if args else function(**{**kwargs, "tensor": wide})
            with torch.no_grad():
                return tensor.copy_(drawn)
        return function(*args, **kwargs)


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns a dtype for its name (`bf16`, `bfloat16`, `fp32`, ...); a dtype and None are returned unchanged."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = str(dtype)
    found: Any = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(name)
    found = getattr(torch, name, None) if found is None else found
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        shown = describe(dtype) if isinstance(dtype, Mapping) else repr(dtype)
        raise ConfigError(f"{shown} is not a dtype of weights. Use bf16, fp16 or fp32.", where="dtype")
    return found


def read_config_file(folder: Path) -> dict[str, Any]:
    """Returns the content of a model folder's config.json."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a model folder: it has no {CONFIG_FILE}. {_advice(folder)}")
    content = read_json(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} has a {type(content).__name__}, not an object with a model's settings.")
    return content


def _advice(folder: Path) -> str:
    """Returns advice on creating a model folder, depending on the contents of this one."""
    shown = shown_path(folder)
    if (folder / RUN_FILE).is_file():
        return f"It is a run. Export its model with `trainwright export {shown} --to FOLDER`, and use that folder."
    if folder.parent.name == "checkpoints" and (folder.parent.parent / RUN_FILE).is_file():
        return f"It is a checkpoint. Export it with `trainwright export {shown} --to FOLDER`, and use that folder."
    if (folder / SECTION_FILE).is_file():
        return (
            "It has the weights of a run under the model's own names (--format safetensors): load them with "
            "safetensors.torch.load_file and model.load_state_dict. A model with save_pretrained can be exported "
            "without --format."
        )
    if (folder / OTHER_CONFIG_FILE).is_file():
        return (
            f"Its {OTHER_CONFIG_FILE} belongs to weights with other names. Load them into their model, export that in "
            "Hugging Face's layout, and use that folder."
        )
    return "Use a folder that save_pretrained or `trainwright export` wrote."


def read_json(path: Path) -> Any:
    """Returns the content of a JSON file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    """Loads the weights of a folder into a module, which may be on the meta device; returns the differences.

    Each weight keeps its file's dtype unless `dtype` is given. Weights that have memory of that dtype are filled in
    place. Tied weights are read once; if a file has two of their names with different values, one is unexpected.
    With `strict`, missing and unexpected keys raise one error before any weight is changed; otherwise they are logged,
    and missing weights of a module on the meta device are initialized by its `reset_parameters`.
    """
    files = weight_files(folder, allow_pickle=allow_pickle)
    keys = {key: path for path in files for key in keys_of(path)}
    plan, report = _plan(model, keys, key_map)
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(_describe(report, folder) + " Choose another model, or load with strict: false.")
    ties = shared_names(model)
    _draw_missing(model, report.missing, ties=ties, device=device, dtype=dtype)
    # Copies touch new memory page by page, for which a single thread is far slower than the memory.
    size = sum(path.stat().st_size for path in files)
    with ThreadPoolExecutor(NUM_COPIES) as pool, progress("Loading weights", total=size, unit="bytes") as advance:
        for path in files:
            here = {name: source for name, source in plan.items() if keys[source.key] == path}
            with open_weights(path) as (_, get):
                mapped = [get(source.key) for source in here.values()]
                for (name, source), tensor in zip(here.items(), mapped, strict=True):
                    _check_tensor(model, name, source, tensor, path)
                into = [_weight(model, name) for name in here]
                copy = partial(_copied, dtype=dtype, device=device)
                for name, tensor in zip(here, pool.map(copy, into, mapped, here.values()), strict=True):
                    set_weight(model, ties.get(name, (name,)), tensor)
                    advance(tensor.nbytes)
                del mapped, tensor
    if report.missing or report.unexpected:
        logger.warning(_describe(report, folder))
    return report


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Returns the files with a folder's weights; rejects a folder without any, or with pickles unless allowed."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _files_of_index(folder / INDEX_FILE)
    pickles = [folder / name for name in (PICKLED_FILE, PICKLED_INDEX_FILE) if (folder / name).is_file()]
    if not pickles:
        problem = f"{folder} has no weights: neither {WEIGHTS_FILE} nor {INDEX_FILE}."
        raise CheckpointError(f"{problem} {_advice(folder)}")
    if not allow_pickle:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run any program when it is read. Convert it to safetensors or, if "
            "you trust its source, pass allow_pickle=True (in a run file, model.pretrained: {folder: …, "
            "allow_pickle: true})."
        )
    return pickles if pickles[0].name == PICKLED_FILE else _files_of_index(pickles[0])


def _files_of_index(index: Path) -> list[Path]:
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from keys to files. Copy the model again.")
    names = sorted(set(weight_map.values()))
    suffixes = (".safetensors",) if index.name == INDEX_FILE else (".bin", ".pt", ".pth")
    # An index of safetensors must not refer to pickles, and no index to files outside of the folder.
    wrong = [name for name in names if not _FILE_NAME.fullmatch(name) or not name.endswith(suffixes)]
    if wrong:
        raise CheckpointError(
            f"{index} lists {listed(wrong)}, but its files must be {' or '.join(f'*{one}' for one in suffixes)} in the "
            "same folder. Do not use this model unless you know who wrote it."
        )
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index} lists {len(names)} files, of which {', '.join(absent)} are missing. Copy the model again."
        )
    return [index.parent / name for name in names]


@contextmanager
def open_weights(path: Path) -> Iterator[tuple[list[str], Callable[[str], Tensor]]]:
    """Opens a file of weights: yields its keys and a function from a key to its tensor.

    The tensors are mapped from the file and may be lost when it is closed.
    """
    if path.suffix != ".safetensors":
        tensors = read_pickled(path)
        yield list(tensors), tensors.__getitem__
        return
    try:
        with safe_open(path, framework="pt") as file:
            yield list(file.keys()), file.get_tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_diagnosis(path)}") from error


def keys_of(path: Path) -> list[str]:
    """Returns the keys of a file of weights; reads only the header of a safetensors file."""
    with open_weights(path) as (keys, _):
        return keys


def _diagnosis(path: Path) -> str:
    """Describes the probable type of an unreadable file, by its first bytes, with advice."""
    start = b""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(64)
    if start.startswith(b"version https://git-lfs"):
        return "It is a Git LFS pointer without the weights: run `git lfs pull` in that repository."
    if start.lstrip()[:1] == b"<":
        return "It is a web page, not weights: the URL needs a login or is wrong. Download it again."
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        return f"It is a torch pickle. Convert it to safetensors, or rename it to {PICKLED_FILE}."
    return "It is damaged or truncated; copy it again."


def integer_keys(folder: Path) -> dict[str, Path]:
    """Returns the keys of a folder's safetensors files that are not floating point, each with its file."""
    found: dict[str, Path] = {}
    for path in weight_files(folder):
        with open_weights(path) as (keys, get):
            found |= {key: path for key in keys if not get(key).is_floating_point()}
    return found


def reject_integers(path: Path, key: str) -> NoReturn:
    """Raises the error for a weight that the files store as integers."""
    raise CheckpointError(
        f"{path}: {key} has whole numbers, but it is a weight. Quantized weights are not supported: use the plain ones."
    )


def shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Maps each name of a tied weight to all of its names; files use the first."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: tuple(names) for names in by_tensor.values() if len(names) > 1 for name in names}


def _plan(model: nn.Module, keys: Mapping[str, Path], key_map: KeyMap | None) -> tuple[dict[str, Source], LoadReport]:
    """Maps each weight to its source; a tied weight to the first of its names in the files."""
    found = {name: Source(*source) for name, source in (key_map or KeyMap()).ours_in(list(keys)).items()}
    ties = shared_names(model)
    plan: dict[str, Source] = {}
    missing = []
    known = set(model.state_dict(keep_vars=True))
    unexpected = [source.key for name, source in found.items() if name not in known]
    for name in model.state_dict(keep_vars=True):
        names = ties.get(name, (name,))
        if name != names[0]:
            continue
        present = [found[one] for one in names if one in found]
        if present:
            plan[name] = present[0]
            unexpected += [other.key for other in present[1:] if not _is_same(present[0], other, keys)]
        else:
            missing.append(name)
    return plan, LoadReport(missing=tuple(sorted(missing)), unexpected=tuple(sorted(unexpected)))


def _is_same(first: Source, second: Source, keys: Mapping[str, Path]) -> bool:
    """Returns True if the files have the same bits under two keys."""
    with open_weights(keys[first.key]) as (_, get_first), open_weights(keys[second.key]) as (_, get_second):
        one, other = get_first(first.key), get_second(second.key)
        one, other = (each.t() if source.transpose else each for each, source in ((one, first), (other, second)))
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        # As bytes, because a nan is not equal to itself.
        return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _describe(report: LoadReport, folder: Path) -> str:
    parts = []
    if report.missing:
        parts.append(f"{len(report.missing)} weights of the model are missing ({listed(report.missing)})")
    if report.unexpected:
        parts.append(f"{len(report.unexpected)} keys are unexpected ({listed(report.unexpected)})")
    return f"{folder} does not fit the model: {'; '.join(parts)}."


def listed(names: Sequence[str], *, at_most: int = 20) -> str:
    """Joins names with commas, at most the first `at_most`; `none` for an empty list."""
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
    for name in missing:
        weight = state[name]
        # The dtype of the loaded weights: a layer cannot mix dtypes.
        wanted = dtype if dtype is not None and weight.is_floating_point() else weight.dtype
        if weight.is_meta:
            set_weight(model, ties.get(name, (name,)), torch.empty(weight.shape, dtype=wanted, device=device))
        elif wanted != weight.dtype:
            set_weight(model, ties.get(name, (name,)), weight.detach().to(wanted))
    if any(state[name].is_meta for name in missing):
        # Everything else is still on the meta device, where initialization costs nothing.
        model.reset_parameters()  # type: ignore[operator]


def _check_tensor(model: nn.Module, name: str, source: Source, tensor: Tensor, path: Path) -> None:
    """Rejects a tensor of another shape than the weight, or of integers."""
    if _weight(model, name).is_floating_point() and not tensor.is_floating_point():
        reject_integers(path, source.key)
    wanted = tuple(_weight(model, name).shape)
    shape = tuple(tensor.shape)
    got = shape[::-1] if source.transpose else shape
    if got != wanted:
        stored = " (stored transposed)" if source.transpose else ""
        raise CheckpointError(
            f"{path}: {source.key} has the shape {shape}{stored}, but the model's {name} has {wanted}. Remove the "
            "settings that change the model's sizes, or use another folder."
        )


@torch.no_grad()
def _copied(
    weight: Tensor, tensor: Tensor, source: Source, *, dtype: torch.dtype | None, device: torch.device | str
) -> Tensor:
    """Fills a weight with a file's tensor and returns it, or returns a copy of the tensor if dtype or device differ.

    A tensor that is mapped from the file must not be used after the file is closed.
    """
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    tensor = tensor.t() if source.transpose else tensor
    if not weight.is_meta and weight.dtype == wanted and weight.device == torch.empty(0, device=device).device:
        return weight.copy_(tensor)
    return tensor.to(device=device, dtype=wanted, copy=True, memory_format=torch.contiguous_format)


def allocate(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Allocates uninitialized memory of these dtypes for the parameters on the meta device."""
    ties = shared_names(model)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            names = ties.get(name, (name,))
            dtype = next((dtypes[one] for one in names if one in dtypes), parameter.dtype)
            # Pages are allocated only when they are written.
            set_weight(model, names, torch.empty(parameter.shape, dtype=dtype))


def set_weight(model: nn.Module, names: tuple[str, ...], tensor: Tensor) -> None:
    """Assigns a tensor to all the names; a weight with memory stays the same object.

    A parameter keeps its attributes (`no_weight_decay`, ...).
    """
    weight = _weight(model, names[0])
    if tensor is weight:
        return
    if not weight.is_meta:
        weight.data = tensor
        return
    if isinstance(weight, nn.Parameter):
        attributes = vars(weight)
        weight = nn.Parameter(tensor, requires_grad=weight.requires_grad)
        weight.__dict__.update(attributes)
    else:
        weight = tensor
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        slots: dict[str, Any] = owner._parameters if isinstance(weight, nn.Parameter) else owner._buffers
        slots[leaf] = weight


def _weight(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(path), leaf)
    return weight
