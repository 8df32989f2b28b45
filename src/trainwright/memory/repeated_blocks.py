"""Compiles a stack of equal blocks once: the first is captured as one graph, which all others run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.backends import waits_for_memory
from trainwright.backends.private_torch import graph_break_error, side_effects_once, tree_leaves
from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import Recomputed
from trainwright.memory.module_paths import (
    Around,
    Forward,
    arounds_of,
    by_path,
    has_around,
    parts_of,
    put_around,
    read_names,
)
from trainwright.parallel.mesh import is_split

logger = logging.getLogger(__name__)

LABEL = "compile_repeated_blocks"
KEYS = ("path", "backend")
APART = "this block is compiled by itself"
"""torch's reason for a graph that ends where such a block begins."""
_EXPECTED = "the path of a list of blocks, such as model.layers"
_PLAIN = (Tensor, bool, int, float, str, type(None))


@dataclass(frozen=True)
class BlockStack:
    """One stack of blocks, or several that a glob matches."""

    path: str
    backend: str | None = None
    """A backend of torch.compile. None: inductor on a GPU; aot_eager, which is exact, on a CPU, where inductor is
    hardly faster."""


def compile_stacks(
    model: nn.Module,
    given: Any,
    *,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    is_whole: bool = True,
    where: object | None = None,
) -> list[str]:
    """Makes all blocks of each stack run one compiled graph; returns the names of the stacks.

    `arguments` are those of torch.compile where the backend is inductor.
    """
    stacks = choose_stacks(model, given, is_whole=is_whole)
    for name, (blocks, setting) in stacks.items():
        is_recomputed = any(has_around(block, Recomputed) for block in blocks)
        if is_recomputed and any(is_split(weight) for block in blocks for weight in block.parameters()):
            # torch's partitioner would save the mesh for the backward pass like a tensor, and fail.
            raise ConfigError(
                f"{LABEL}: the blocks of {name} are recomputed and sharded along tensor, which torch.compile does not "
                "support together. Remove model.compile_repeated_blocks or model.activation_checkpointing, or use "
                "another axis of runtime.mesh."
            )
        graph = _Graph(name, setting.backend, arguments, is_recomputed=is_recomputed)
        for block in blocks:
            put_around(block, partial(Compiled, graph=graph, where=where))
        logger.info("model.compile_repeated_blocks: the %d blocks of %s are compiled as one graph.", len(blocks), name)
    return list(stacks)


def keep_apart(model: nn.Module) -> bool:
    """Excludes such blocks from a compiled forward of the whole model; returns whether there are any.

    If they were inlined, each block would be compiled separately, and the compile time would grow with the depth.
    """
    found = [each for module in model.modules() for each in arounds_of(module) if isinstance(each, Compiled)]
    if not found:
        return False
    apart = torch.compiler.disable(_run_apart, recursive=False, reason=APART)  # type: ignore[no-untyped-call]
    for each in found:
        each.apart = apart
    return True


def compile_gathered(model: nn.Module, backend: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> bool:
    """Compiles each FSDP block, inside of the hooks that gather its parameters.

    Returns whether there are any: the code around them is then not compiled, because the hooks are in no graph. Equal
    blocks share one. Blocks of `model.compile_repeated_blocks` already have theirs.
    """
    if "torch.distributed.fsdp" not in sys.modules:  # slow to import, and without it there are none
        return False
    from torch.distributed.fsdp import FSDPModule

    blocks = [each for each in model.modules() if isinstance(each, FSDPModule)]
    if not blocks:
        return False
    is_outer = [any(isinstance(each, FSDPModule) for each in block.modules() if each is not block) for block in blocks]
    _compile_each([block for block, outer in zip(blocks, is_outer, strict=True) if not outer], backend, arguments)
    return True


def compile_blocks(model: nn.Module, backend: str, arguments: Mapping[str, Any]) -> None:
    """Compiles each block of a replicated model as a separate graph, for `keep_apart`.

    The backward of a single graph returns all gradients at its end. With a graph for each block, the gradients of the
    last blocks are summed over ranks while those of the first are computed. A layer without submodules is not a block.
    """
    from trainwright.parallel.fully_shard import find_blocks  # imports much of torch

    blocks = [block for block in find_blocks(model) if next(block.children(), None) is not None]
    _compile_each(blocks, backend, arguments)


def _compile_each(blocks: list[nn.Module], backend: str, arguments: Mapping[str, Any]) -> None:
    """Compiles blocks that are not compiled yet; equal ones share a graph."""
    graphs: dict[str, _Graph] = {}
    for block in blocks:
        if has_around(block, Compiled):
            continue
        kind = f"{type(block).__name__} {_structure(block)}"
        name = f"{type(block).__name__}_{len(graphs)}"
        is_recomputed = has_around(block, Recomputed)
        new = _Graph(name, backend, arguments, is_recomputed=is_recomputed, is_whole=False)
        graph = graphs.setdefault(kind, new)
        put_around(block, partial(Compiled, graph=graph))


def choose_stacks(
    model: nn.Module, given: Any, *, is_whole: bool = True
) -> dict[str, tuple[list[nn.Module], BlockStack]]:
    """Returns the blocks of each stack, by name, without a change; rejects a stack without equal blocks."""
    stacks: dict[str, tuple[list[nn.Module], BlockStack]] = {}
    for setting in read_repeated_blocks(given):
        for name, stack in parts_of(LABEL, model, setting.path, is_whole=is_whole).items():
            if not isinstance(stack, nn.ModuleList | nn.Sequential) or not len(stack):
                raise ConfigError(f"{LABEL}: {name} is a {type(stack).__name__}. Use the path of a list of blocks.")
            blocks = dict(stack.named_children())
            if not is_whole:  # in a pipeline, nn.Identity replaces the blocks of other stages
                blocks = {number: block for number, block in blocks.items() if type(block) is not nn.Identity}
            _reject_unequal(name, blocks)
            if name in stacks:
                raise ConfigError(f"{LABEL}: {name} is set twice. Keep one of the two.")
            stacks[name] = (list(blocks.values()), setting)
    return stacks


def read_repeated_blocks(given: Any) -> list[BlockStack]:
    """Reads a path, a list of paths, {path: …, backend: …}, or a mapping from paths to backends or {backend: …}."""
    if isinstance(given, str | list | tuple):
        paths = (given,) if isinstance(given, str) else given
        return [BlockStack(path) for path in read_names(LABEL, paths, expected=_EXPECTED)]
    settings = by_path(LABEL, given, KEYS) if isinstance(given, Mapping) else {}
    if "" in settings and "path" in given:
        [path] = read_names(f"{LABEL}.path", [given["path"]], expected=_EXPECTED)
        return [BlockStack(path, known_backend(f"{LABEL}.backend", given.get("backend")))]
    if not settings or "" in settings:
        raise ConfigError(f"{LABEL}: must be {_EXPECTED}, or {{path: …, backend: …}}; got {describe(given)}.")
    read = []
    for path, setting in settings.items():
        label = f'{LABEL}."{path}"'
        if isinstance(setting, Mapping):
            unknown = next((key for key in setting if key != "backend"), None)
            if unknown is not None:
                raise ConfigError(f"{label}: {unknown} is unknown. Known: backend.")
            setting = setting.get("backend")
        read.append(BlockStack(path, known_backend(label, setting)))
    return read


class Compiled(Around):
    """A block's forward as the graph of its stack."""

    def __init__(self, forward: Forward, graph: _Graph, where: object | None = None) -> None:
        super().__init__(forward)
        self._graph = graph
        self._where = where
        self.apart: Callable[..., Any] | None = None
        """Runs the block outside of the graph of the model; None: inside."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph, or the block itself for arguments that a graph does not support, such as a cache of
        generation."""
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
    """The compiled block of one stack, compiled at the first run."""

    def __init__(
        self,
        name: str,
        backend: str | None,
        arguments: Mapping[str, Any],
        *,
        is_recomputed: bool,
        is_whole: bool = True,
    ) -> None:
        self.name = name
        self._backend = backend
        self._arguments = dict(arguments)
        self.is_whole = is_whole
        self._is_recomputed = is_recomputed
        self._run: Callable[..., Any] | None = None

    def run(self, device: torch.device, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the forward of any block of the stack."""
        if self._run is None:
            backend = self._backend or ("inductor" if waits_for_memory(device) else "aot_eager")
            # torch limits graphs per code object to eight, so each stack has its own code object.
            code = _run_block.__code__.replace(co_name=f"run_block_of_{self.name}")
            arguments = self._arguments if backend == "inductor" else {}
            function = FunctionType(code, globals())
            self._run = torch.compile(function, backend=backend, fullgraph=self.is_whole, **arguments)
        # Inside of another graph that graph's setting applies.
        if not self._is_recomputed or torch.compiler.is_compiling():
            return self._run(forward, args, kwargs)
        with side_effects_once():  # at each call, because each may compile again
            return self._run(forward, args, kwargs)


def _run_apart(block: Compiled, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block.run(args, kwargs)


def _run_block(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return forward(*args, **kwargs)


def _reject_unequal(stack: str, blocks: Mapping[str, nn.Module]) -> None:
    """Rejects a stack whose blocks differ; the error has the first difference."""
    numbers = list(blocks)
    first = _structure(blocks[numbers[0]]) if numbers else {}
    for number in numbers[1:]:
        other = _structure(blocks[number])
        for path in dict.fromkeys([*first, *other]):
            if first.get(path) != other.get(path):
                shown = [each.get(path) or "nothing" for each in (first, other)]
                raise ConfigError(
                    f"{LABEL}: the blocks of {stack} differ: {path or 'the block'} is {shown[0]} in "
                    f"{stack}.{numbers[0]} and {shown[1]} in {stack}.{number}. Remove the setting, or make them equal."
                )


def _structure(block: nn.Module) -> dict[str, str]:
    """Returns everything that a graph of the block depends on, by name: modules with their sizes, weights, buffers.

    Blocks that differ only in which layers train in fp8 count as equal: torch compiles one graph for each kind.
    """
    found = {}
    for name, module in block.named_modules():
        kind = getattr(type(module), "evaluates_as", type(module))
        found[name] = f"{kind.__name__}({module.extra_repr()})"
    for name, tensor in [*block.named_parameters(), *block.named_buffers()]:
        found[name] = f"{tuple(tensor.shape)} in {str(tensor.dtype).removeprefix('torch.')}"
    return found


def known_backend(label: str, given: Any, *, where: object | None = None) -> str | None:
    """Returns a setting that is a backend of torch.compile, or None; rejects one that torch does not have."""
    # The list is that of torch; it does not contain "eager", which runs recomputed blocks with different random
    # numbers.
    known = [*torch.compiler.list_backends(), "aot_eager"]
    if given is not None and given not in known:
        found = nearest(given, known) if isinstance(given, str) else None
        guess = f' Did you mean "{found}"?' if found else ""
        problem = f"{describe(given)} is not a backend of torch.compile for training.{guess}"
        raise ConfigError(f"{label}: {problem} Known: {', '.join(known)}.", where=where)
    return None if given is None else str(given)
