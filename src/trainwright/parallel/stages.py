"""Which layers each stage of a pipeline keeps, and how a model that kept only some of them runs.

A model takes part that has its forward in parts (`blocks`, `begin`, `beside`, `finish`: models/model.py). The blocks
are dealt out in order; what comes before them stays on the first stage, what comes after them on the last. Names of
parameters stay as they are. Who sends what to whom is pipeline.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn

from trainwright.errors import ConfigError
from trainwright.parallel.local import named_tensors
from trainwright.parallel.mesh import Mesh

PARTS = ("begin", "hidden_shape", "beside", "finish")
"""The methods that say what `forward` does, beside the blocks."""


class Stage(NamedTuple):
    """What of a model one rank has: the blocks of these numbers, and the parameters that the other end has too."""

    number: int
    num_stages: int
    blocks: range
    tied: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """Does it begin, from the batch?"""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Does it finish, with the loss?"""
        return self.number == self.num_stages - 1


def refuse_pipeline(model: nn.Module, num_stages: int, *, own_parts: Sequence[str] = (), where: Any = None) -> None:
    """Refuses a model that cannot be cut into so many stages, or a run whose own code would not be called.

    `own_parts` names what a user wrote of the step (`MyTrainer.train_step`), which the schedule of the stages replaces.
    """
    asked = f"runtime.mesh.pipeline is {num_stages}, but"
    kind = type(model)
    path = getattr(model, "blocks", None)
    if own_parts:
        raise ConfigError(
            f"{asked} {', '.join(own_parts)} would not be called: the stages' schedule runs forward and backward by "
            "itself. Leave out pipeline (data and tensor split a model too), or these methods.",
            where=where,
        )
    if not isinstance(path, str):
        raise ConfigError(
            f"{asked} {kind.__name__} is not made of blocks that follow each other: it names none in `blocks`. "
            "Use llama, gpt2, bert or vit, or split it along data or tensor instead.",
            where=where,
        )
    owner = _owner(kind, "forward")
    others = [name for name in ("blocks", *PARTS) if _owner(kind, name) is not owner]
    if others:
        raise ConfigError(
            f"{asked} {owner.__name__}.forward and {_owner(kind, others[0]).__name__}.{others[0]} are of different "
            f"classes, so that stages would compute something else than forward. Let one class have forward, blocks, "
            f"{', '.join(PARTS)}, or leave out pipeline.",
            where=where,
        )
    num_blocks = len(_blocks_of(model))
    if num_blocks < num_stages:
        raise ConfigError(
            f"{asked} {kind.__name__} has {num_blocks} blocks ({path}): each stage needs one. Use at most "
            f"{num_blocks} stages, or more layers.",
            where=where,
        )
    for name in _outer_names(path):
        around = model.get_submodule(name)
        if around._forward_hooks or around._forward_pre_hooks:
            raise ConfigError(
                f"{asked} {name} has hooks on its forward, which no stage calls. Put them on the blocks instead.",
                where=where,
            )


def split_layers(model: nn.Module, mesh: Mesh) -> None:
    """Keeps in place what this rank's stage needs; everything else becomes an empty module or None.

    From then on `model(hidden, batch)` runs this stage: the first ignores `hidden`, the last returns the outputs.
    A weight that the first and the last stage share (tied embeddings) stays on both, under the same name.
    """
    num_stages, number = mesh.size("pipeline"), mesh.rank("pipeline")
    refuse_pipeline(model, num_stages)
    stages = stages_of(model, num_stages)
    at_both_ends = tuple(name for name, having in stages.items() if len(having) > 1)
    share = _deal(len(_blocks_of(model)), num_stages)[number]
    _let_go(model, "", lambda name: number in stages[name])
    stage: Any = Stage(number, num_stages, share, at_both_ends)
    model.stage = stage
    # Bound, so that a copy of the model runs itself; called through the model, so that hooks on it (FSDP's) run.
    model.forward = MethodType(_run_stage, model)


def stages_of(model: nn.Module, num_stages: int) -> dict[str, tuple[int, ...]]:
    """Returns which stages have each parameter and buffer of a model that is still whole, under all of its names."""
    shares = _deal(len(_blocks_of(model)), num_stages)
    homes = {name: _home(name, model, shares) for name, _ in named_tensors(model)}
    tied = _tied_names(model, homes)
    last = num_stages - 1
    return {name: tuple(sorted({home, last})) if name in tied else (home,) for name, home in homes.items()}


def mark_shared(model: nn.Module) -> None:
    """Leaves on each parameter that both ends have, as `num_stages`, how many stages count it in a sum over stages.

    For a model that is split in every way already: splitting makes other parameters.
    """
    stage: Any = model.stage
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in stage.tied:
        if name in own:
            own[name].num_stages = 2  # type: ignore[attr-defined]  # a mark, as lr_scale is


def _run_stage(model: Any, hidden: Tensor | None, batch: Mapping[str, Any], *, only_begins: bool = False) -> Any:
    """Runs what this rank has of the model, in place of its forward."""
    stage: Stage = model.stage
    if stage.is_first:
        hidden = model.begin(**batch)
    if only_begins:
        return hidden
    beside = model.beside(**batch)
    blocks = _blocks_of(model)
    for number in stage.blocks:
        hidden = blocks[number](hidden, *beside)
    return model.finish(hidden, **batch) if stage.is_last else hidden


def _blocks_of(model: Any) -> nn.ModuleList:
    blocks: nn.ModuleList = model.get_submodule(model.blocks)
    return blocks


def _deal(num_blocks: int, num_stages: int) -> list[range]:
    """Deals blocks out evenly and in order; the first stages have one more, for the last has the head."""
    few, rest = divmod(num_blocks, num_stages)
    starts = [number * few + min(number, rest) for number in range(num_stages + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _home(name: str, model: Any, shares: Sequence[range]) -> int:
    """Returns the stage that needs a parameter or buffer."""
    if _is_within(name, model.blocks):
        number = int(name.removeprefix(f"{model.blocks}.").partition(".")[0])
        return next(stage for stage, share in enumerate(shares) if number in share)
    is_before = any(_is_within(name, part) for part in model.parts_before_blocks)
    return 0 if is_before else len(shares) - 1


def _tied_names(model: Any, homes: Mapping[str, int]) -> set[str]:
    """Returns all names of the weights that both ends need; refuses weights that blocks of several stages share."""
    names: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
    tied: set[str] = set()
    for shared in names.values():
        if len({homes[name] for name in shared}) == 1:
            continue
        if any(_is_within(name, model.blocks) for name in shared):
            raise ConfigError(
                f"runtime.mesh.pipeline: {' and '.join(shared)} are one weight, but belong to different stages. Only "
                "what comes before and after the blocks may be shared. Use fewer stages, or weights of their own."
            )
        tied.update(shared)
    return tied


def _let_go(module: nn.Module, prefix: str, keeps: Callable[[str], bool]) -> None:
    """Empties what holds nothing that is kept, from the outside in."""
    for name, child in module._modules.items():
        kept = [keeps(f"{prefix}{name}.{each}") for each, _ in named_tensors(child)] if child is not None else []
        if child is None or all(kept):
            continue
        if any(kept):
            _let_go(child, f"{prefix}{name}.", keeps)
        else:
            module._modules[name] = nn.Identity()
    for held in (module._parameters, module._buffers):
        for name, tensor in held.items():
            if tensor is not None and not keeps(f"{prefix}{name}"):
                held[name] = None  # as register_parameter(name, None) does


def _owner(kind: type[Any], name: str) -> type[Any]:
    """Returns the class that gives a class its attribute."""
    return next((each for each in kind.__mro__ if name in vars(each)), object)


def _outer_names(path: str) -> list[str]:
    """Returns the paths of the modules around the blocks, without the model itself: a.b.c → a, a.b, a.b.c."""
    parts = path.split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _is_within(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
