"""Compiles a stack of equal blocks once: the first is captured as one graph, and all others run it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import graph_break_error, side_effects_once, tree_leaves
from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import Recomputed
from trainwright.memory.module_paths import Around, Forward, arounds_of, by_path, has_around, parts_of, put_around
from trainwright.parallel.mesh import is_split

logger = logging.getLogger(__name__)

LABEL = "compile_repeated_blocks"
WORDS = ("path", "backend")
APART = "a block of model.compile_repeated_blocks is compiled by itself"
"""What torch gives as the reason of a graph that ends where such a block begins."""
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(frozen=True)
class BlockStack:
    """One stack of blocks, or several that a glob names."""

    path: str
    backend: str | None = None
    """A backend of torch.compile. None: inductor on a GPU, and aot_eager, which keeps every bit, on a CPU, where
    inductor gains next to nothing."""


def compile_stacks(model: nn.Module, given: Any, *, is_whole: bool = True, where: object | None = None) -> list[str]:
    """Has every block of the stacks that a setting names run one compiled graph; returns the stacks' names."""
    stacks = choose_stacks(model, given, is_whole=is_whole)
    for name, (blocks, setting) in stacks.items():
        is_recomputed = any(has_around(block, Recomputed) for block in blocks)
        if is_recomputed and any(is_split(weight) for block in blocks for weight in block.parameters()):
            # Torch's partitioner would save the mesh for the backward pass as if it were a tensor, and fail.
            raise ConfigError(
                f"{LABEL}: the blocks of {name} are recomputed and split along tensor, which torch.compile cannot do "
                "at once. Remove model.compile_repeated_blocks or model.activation_checkpointing, or use another axis "
                "of runtime.mesh."
            )
        graph = _Graph(name, setting.backend, is_recomputed=is_recomputed)
        for block in blocks:
            put_around(block, partial(Compiled, graph=graph, where=where))
        logger.info("model.compile_repeated_blocks: the %d blocks of %s are compiled as one.", len(blocks), name)
    return list(stacks)


def keep_apart(model: nn.Module) -> bool:
    """Lets whoever compiles the whole forward leave such blocks to their own graph; returns whether there are any.

    Inlined into the code around them, each block would be compiled again, and the time would grow with the depth.
    """
    found = [each for module in model.modules() for each in arounds_of(module) if isinstance(each, Compiled)]
    if not found:
        return False
    apart = torch.compiler.disable(_run_apart, recursive=False, reason=APART)  # type: ignore[no-untyped-call]
    for each in found:
        each.apart = apart
    return True


def compile_gathered(model: nn.Module, backend: str) -> bool:
    """Compiles each block whose parameters are gathered for its use, inside of the hooks that gather them.

    Returns whether there are any: the code around them then runs as it is, for those hooks are in no graph. Equal
    blocks share one. Blocks of `model.compile_repeated_blocks` have theirs already.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # it imports much of torch, and without it there are none
        return False
    from torch.distributed.fsdp import FSDPModule

    blocks = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not blocks:
        return False
    graphs: dict[str, _Graph] = {}
    for block in blocks:
        is_outer = any(isinstance(each, FSDPModule) for each in block.modules() if each is not block)
        if is_outer or has_around(block, Compiled):
            continue
        kind = f"{type(block).__name__} {_structure(block)}"
        name = f"{type(block).__name__}_{len(graphs)}"
        is_recomputed = has_around(block, Recomputed)
        graph = graphs.setdefault(kind, _Graph(name, backend, is_recomputed=is_recomputed, is_whole=False))
        put_around(block, partial(Compiled, graph=graph))
    return True


def choose_stacks(
    model: nn.Module, given: Any, *, is_whole: bool = True
) -> dict[str, tuple[list[nn.Module], BlockStack]]:
    """Returns the blocks of each stack, by its name, changing nothing; rejects what is no stack of equal blocks."""
    stacks: dict[str, tuple[list[nn.Module], BlockStack]] = {}
    for setting in read_repeated_blocks(given):
        for name, stack in parts_of(LABEL, model, setting.path, is_whole=is_whole).items():
            if not isinstance(stack, nn.ModuleList | nn.Sequential) or not len(stack):
                raise ConfigError(f"{LABEL}: {name} is a {type(stack).__name__}, not a list of blocks. Name the list.")
            blocks = dict(stack.named_children())
            if not is_whole:  # in a pipeline, identities stand for the blocks of other stages
                blocks = {number: block for number, block in blocks.items() if type(block) is not nn.Identity}
            _reject_unequal(name, blocks)
            if name in stacks:
                raise ConfigError(f"{LABEL}: {name} is named twice. Keep one of the two.")
            stacks[name] = (list(blocks.values()), setting)
    return stacks


def read_repeated_blocks(given: Any) -> list[BlockStack]:
    """Reads a path, a list of paths, {path: …, backend: …}, or a mapping from paths to backends or {backend: …}."""
    if isinstance(given, str | list | tuple):
        paths = (given,) if isinstance(given, str) else given
        return [BlockStack(_text(LABEL, path)) for path in paths] or _reject(given)
    if not isinstance(given, Mapping) or not given:
        return _reject(given)
    settings = by_path(LABEL, given, WORDS)
    if "" in settings:
        if "path" not in given:
            return _reject(given)
        return [BlockStack(_text(f"{LABEL}.path", given["path"]), _backend(f"{LABEL}.backend", given.get("backend")))]
    read = []
    for path, setting in settings.items():
        label = f'{LABEL}."{path}"'
        if isinstance(setting, Mapping):
            unknown = next((key for key in setting if key != "backend"), None)
            if unknown is not None:
                raise ConfigError(f"{label}: {unknown} is unknown. Known: backend.")
            setting = setting.get("backend")
        read.append(BlockStack(path, _backend(label, setting)))
    return read


class Compiled(Around):
    """A block's forward as the graph of its stack."""

    def __init__(self, forward: Forward, graph: _Graph, where: object | None = None) -> None:
        super().__init__(forward)
        self._graph = graph
        self._where = where
        self.apart: Callable[..., Any] | None = None
        """What runs the block out of the graph of the code around it; None where it may be a part of that."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph; with an argument that no graph can hold, such as a cache of generation, the block itself."""
        return self.run(args, kwargs) if self.apart is None else self.apart(self, args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the graph of the stack."""
        leaves = tree_leaves((args, kwargs))
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
            return self.inner(*args, **kwargs)
        device = next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
        try:
            return self._graph.run(device, self.inner, args, kwargs)
        except graph_break_error() as error:
            if not self._graph.is_whole:
                raise
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"model.{LABEL}: a block of {self._graph.name} cannot be captured as one graph: {first}. "
                "`trainwright check` names the line. Change it, or remove the setting.",
                where=self._where,
            ) from error


class _Graph:
    """The compiled form of one stack's block, made when it is first run."""

    def __init__(self, name: str, backend: str | None, *, is_recomputed: bool, is_whole: bool = True) -> None:
        self.name = name
        self._backend = backend
        self.is_whole = is_whole
        self._is_recomputed = is_recomputed
        self._run: Callable[..., Any] | None = None

    def run(self, device: torch.device, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward of any block of the stack."""
        compiled = self._compiled(device)
        # Inside of another graph the setting is that graph's.
        if not self._is_recomputed or torch.compiler.is_compiling():
            return compiled(forward, args, kwargs)
        with side_effects_once():  # at each call, for each may compile again
            return compiled(forward, args, kwargs)

    def _compiled(self, device: torch.device) -> Callable[..., Any]:
        if self._run is None:
            backend = self._backend or ("inductor" if waits_for_memory(device) else "aot_eager")
            # Torch counts graphs by code object, and gives up at eight: each stack counts its own.
            code = _run_block.__code__.replace(co_name=f"run_block_of_{self.name}")
            self._run = torch.compile(FunctionType(code, globals()), backend=backend, fullgraph=self.is_whole)
        return self._run


def _run_apart(block: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block.run(args, kwargs)


def _run_block(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _reject_unequal(stack: str, blocks: Mapping[str, nn.Module]) -> None:
    """Rejects a stack whose blocks differ, with the first difference."""
    numbers = list(blocks)
    if not numbers:
        return
    first = _structure(blocks[numbers[0]])
    for number in numbers[1:]:
        other = _structure(blocks[number])
        for place in [*first, *(place for place in other if place not in first)]:
            if first.get(place) != other.get(place):
                shown = [each.get(place) or "nothing" for each in (first, other)]
                raise ConfigError(
                    f"{LABEL}: the blocks of {stack} differ: {place or 'the block'} is {shown[0]} in "
                    f"{stack}.{numbers[0]} and {shown[1]} in {stack}.{number}. Remove the setting, or make them equal."
                )


def _structure(block: nn.Module) -> dict[str, str]:
    """Returns what a graph of the block depends on, by name: modules with their sizes, weights, buffers."""
    found = {name: f"{type(module).__name__}({module.extra_repr()})" for name, module in block.named_modules()}
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        found[name] = f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
    return found


def known_backend(label: str, given: Any, *, where: object | None = None) -> str | None:
    """Returns a setting that names a backend of torch.compile; rejects one that torch does not have."""
    try:
        return _backend(label, given)
    except ConfigError as error:
        raise ConfigError(error.problem, where=where) from error


def _backend(label: str, given: Any) -> str | None:
    if given is None:
        return None
    # The list is torch's own; "eager" is not in it, and runs recomputed blocks with other random numbers.
    known = [*torch.compiler.list_backends(), "aot_eager"]
    if not isinstance(given, str) or given not in known:
        found = nearest(given, known) if isinstance(given, str) else None
        guess = f' Did you mean "{found}"?' if found else ""
        raise ConfigError(
            f"{label}: {describe(given)} is no backend of torch.compile that trains.{guess} Known: {', '.join(known)}."
        )
    return given


def _text(label: str, given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ConfigError(
            f"{label}: must be the path of a list of blocks, such as model.layers; got {describe(given)}."
        )
    return given


def _reject(given: Any) -> list[BlockStack]:
    raise ConfigError(
        f"{LABEL}: give the path of a list of blocks, such as model.layers, or {{path: …, backend: …}}; "
        f"got {describe(given)}."
    )
