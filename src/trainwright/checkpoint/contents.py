"""The contents of a checkpoint and how they are restored; this is the only list of a run's state.

Parts: `model` (its state dict), `base` (references to frozen pretrained weights, which `model` lacks), `optimizers`
(state by parameter name), `training` (step, data position, hooks, trainer, task, events, loss scale, schedules,
generators, trainable parameters). store.py has files and commits. A sharded tensor is a DTensor in both directions:
saved in shards, and loaded as the region of this rank's shard.
"""

from __future__ import annotations

import inspect
import json
import logging
import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from trainwright.checkpoint import base_weights
from trainwright.checkpoint.encoding import SplitTensor, as_whole, encode, fill, map_tensors, shard_like
from trainwright.checkpoint.remote_store import AnyStore
from trainwright.errors import CheckpointError, ConfigError
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import is_split, local

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """An object with state that a checkpoint saves."""

    def state_dict(self) -> Any:
        """Returns the state."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restores it."""


def collect(
    *,
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    hooks: Mapping[str, Stateful],
    events: Mapping[str, Any],
    data: Mapping[str, Any],
    loss_scale: Stateful | None,
    anomalies: Stateful,
    generators: list[dict[str, Any]],
    step: int,
    has_unfinished_step: bool,
    begun_epoch: int,
    data_start: int,
    max_steps_at_end: int,
    unclaimed_hook_state: Mapping[str, Any],
    schedules: Mapping[str, Stateful] = MappingProxyType({}),
    trainable: Mapping[str, Any] | None = None,
    own_states: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    averaged: tuple[Mapping[str, torch.Tensor], bool] = ({}, False),
    references: Mapping[str, Any] | None = None,
    weights_only: bool = False,
) -> dict[str, Any]:
    """Returns a checkpoint's parts. `generators` has one entry per data rank; `events` counts all ranks.

    `trainable` has the names of the trainable parameters and the base rates of the groups; None for a pipeline.
    `own_states` are the states of the trainer and the task by these names, as returned by `merge_states`. `averaged`
    has the averaged weights, and whether evaluations use them. `references` is the part `base`; the weights that it
    names are omitted from `model`. With `weights_only` there is no state to resume from.
    """
    weights = model.state_dict()  # first, because FSDP replaces gathered parameters by its sharded ones
    names = _names_by_parameter(model)
    if references:
        weights = {name: value for name, value in weights.items() if name not in references["hashes"]}
    averages = {"weights": dict(averaged[0]), "is_evaluated": averaged[1]}
    progress = {
        "step": step,
        "begun_epoch": begun_epoch,
        "data_start": data_start,
        "has_unfinished_step": has_unfinished_step,
        "max_steps_at_end": max_steps_at_end,
    }
    parts = {"model": weights, **({base_weights.PART: references} if references else {})}
    if weights_only:
        return {**parts, "training": {**progress, "hooks": {}, "averaged": averages}}
    return {
        **parts,
        "optimizers": {name: _state_by_name(optimizer, names) for name, optimizer in optimizers.items()},
        "training": {
            **progress,
            "data": dict(data),
            "hooks": {**unclaimed_hook_state, **{key: hook.state_dict() for key, hook in hooks.items()}},
            # After the hooks: tensors that are also in a hook's state are stored once, under the hook's key.
            "averaged": averages,
            **own_states,
            "events": dict(events),
            "loss_scale": None if loss_scale is None else loss_scale.state_dict(),
            "trainable": trainable,
            "schedules": {name: each.state_dict() for name, each in schedules.items()},
            "anomalies": anomalies.state_dict(),
            "generators": generators,
        },
    }


def reject_unsavable(hooks: Mapping[str, Stateful], owners: Iterable[Stateful] = ()) -> None:
    """Rejects state that cannot be saved, before the run instead of at its first save.

    `owners` are the trainer and the task, if they have state.
    """
    for key, hook in hooks.items():
        encode(hook.state_dict(), name=f"hooks.{key}", accepts_shards=True)
    for owner in owners:
        encode(state_of(owner), name=f"{type(owner).__name__}.state_dict()", accepts_shards=True)


def state_of(owner: Stateful) -> Mapping[str, Any]:
    """Returns the state of a trainer or a task; raises if it is not a mapping."""
    state = owner.state_dict()
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{type(owner).__name__}.state_dict() returned a {type(state).__name__}. Return a dict, such as "
            "{'count': self.count}."
        )
    return state


def copy_state(value: Any) -> Any:
    """Returns an independent copy of a state, with tensors on their devices."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return {key: copy_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_state(item) for item in value)
    return value


def merge_states(own: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Returns the state of a trainer or a task on all data ranks; collective.

    `shared` has values that are equal on every rank, and sharded tensors; `by_rank` has the others for each data rank,
    and is empty if there are none. Replicated weights are therefore stored once.
    """
    if ranks.size == 1:
        return {"num_ranks": 1, "shared": own, "by_rank": []}
    leaves = dict(_leaves(own))
    digests = ranks.gather(_digest(leaves))
    equal = {path for path, digest in digests[0].items() if all(each.get(path) == digest for each in digests)}
    different = {path: value for path, value in leaves.items() if path not in equal}
    by_rank: list[Any] = []
    if any(each.keys() != equal for each in digests):  # the same answer on every rank
        to_host = map_tensors(_nest(different), lambda tensor, _: tensor.detach().cpu())
        by_rank = ranks.gather_samples(to_host)
    shared = _nest({path: value for path, value in leaves.items() if path in equal})
    return {"num_ranks": ranks.mesh.num_data_ranks, "shared": shared, "by_rank": by_rank}


def restore_state(
    saved: Mapping[str, Any] | None,
    owner: Stateful,
    ranks: Ranks,
    *,
    model: torch.nn.Module,
    accept_changes: bool = False,
) -> None:
    """Loads the state of a trainer or a task from the result of `merge_states`; tensors are sharded like those of
    hooks.

    State that differs between ranks requires the number of ranks that saved it; any other number raises. With
    `accept_changes`, rank r then loads the state of rank r modulo that number.
    """
    name = type(owner).__name__
    if saved is None:
        logger.warning("The checkpoint has no state of %s, which starts with its initial state.", name)
        return
    mesh, num_ranks, by_rank = ranks.mesh, int(saved["num_ranks"]), saved["by_rank"]
    if by_rank and num_ranks != mesh.num_data_ranks:
        keys = ", ".join(dict.fromkeys(str(key) for each in by_rank for key in each))
        problem = (
            f"{name}.state_dict(): {keys} differ{'s' * (',' not in keys)} between the {num_ranks} data ranks that "
            f"saved the checkpoint, but this run has {mesh.num_data_ranks}"
        )
        if not accept_changes:
            raise CheckpointError(
                f"{problem}. Use {num_ranks} data ranks (runtime.mesh), or continue with --accept-changes: rank r then "
                f"loads the state of rank r modulo {num_ranks}."
            )
        logger.warning("%s: rank r loads the state of rank r modulo %d.", problem, num_ranks)
    elif num_ranks == 1 and mesh.num_data_ranks > 1:
        logger.warning(
            "%s.state_dict() was saved by one data rank: each of the %d ranks loads it.", name, mesh.num_data_ranks
        )
    state = _union(saved["shared"], by_rank[mesh.data_rank % num_ranks]) if by_rank else saved["shared"]
    owner.load_state_dict(lay_out_like(model, state))


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields every value below nested mappings with its keys; an empty mapping is a value."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, item in value.items():
        yield from _leaves(item, (*path, key))


def _nest(leaves: Mapping[tuple[Any, ...], Any]) -> Any:
    """Returns the nested mappings that have these leaves."""
    nested: dict[Any, Any] = {}
    for path, value in leaves.items():
        if not path:
            return value
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return nested


def _union(one: Any, other: Any) -> Any:
    """Returns the nested mappings with the leaves of both."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return other
    return {**one, **{key: _union(one[key], item) if key in one else item for key, item in other.items()}}


def _digest(leaves: Mapping[tuple[Any, ...], Any]) -> dict[tuple[Any, ...], Any]:
    """Returns a key that is equal on two ranks only if the value is equal; all sharded tensors have the same key."""
    found = {path: encode(value, accepts_shards=True) for path, value in leaves.items()}
    sums = iter(base_weights.bit_checksums(tensor for each in found.values() for tensor in each.tensors.values()))
    digests: dict[tuple[Any, ...], Any] = {}
    for path, each in found.items():
        tensors = [(str(tensor.dtype), tuple(tensor.shape), next(sums)) for tensor in each.tensors.values()]
        digests[path] = "sharded" if each.shard_locations else (json.dumps(each.tree), tensors)
    return digests


def generator_state() -> dict[str, Any]:
    """Returns the states of Python's and numpy's generators. Torch's are not saved, because every step seeds them."""
    return {"python": random.getstate(), "numpy": np.random.get_state()}


def restore_generators(state: Mapping[str, Any]) -> None:
    """Restores `generator_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))


def has_only_weights(store: AnyStore, step: int) -> bool:
    """Returns True for a checkpoint of `checkpoint.contents: weights`, from which no run can resume."""
    return "optimizers" not in store.parts(step)


def read_references(store: AnyStore, step: int) -> Mapping[str, Any]:
    """Returns the part `base` of a checkpoint: `source`, and `hashes` by name; {} if it has all weights."""
    return dict(store.read(step, base_weights.PART)) if base_weights.PART in store.parts(step) else {}


def restore_model(store: AnyStore, step: int, model: torch.nn.Module, *, strict: bool = True) -> None:
    """Loads a checkpoint's weights into a model that was just built, on the CPU, in place."""
    recorded, source, present = read_references(store, step), store.path(step), list[str]()
    if recorded:
        own = base_weights.weights_of(model)
        hashes = base_weights.hash_weights({name: own[name] for name in recorded["hashes"] if name in own})
        present = base_weights.check_references(recorded, hashes, where=source)
    load_model_state(store.read_split(step, "model"), model, source=str(source), strict=strict, present=present)


def load_model_state(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    *,
    source: str,
    strict: bool = True,
    other_stages: Collection[str] = (),
    present: Collection[str] = (),
) -> None:
    """Loads weights in place; an error names mismatched keys with both shapes, and the `source` of the weights.

    Keys of `other_stages` belong to other stages of a pipeline. The model already has the values of `present`.
    """
    missing, unexpected = reject_other_model(
        state, model, source=source, strict=strict, other_stages=other_stages, present=present
    )
    if missing or unexpected:
        logger.warning("Loaded with differences. Missing: %s. Unexpected: %s.", missing or "none", unexpected or "none")
    own = model.state_dict()
    here = {key: value for key, value in state.items() if key in own or key not in other_stages}
    here |= {key: own[key] for key in present if key in own and key not in state}
    model.load_state_dict({key: _fill_shards(value, own.get(key)) for key, value in here.items()}, strict=strict)


def reject_other_model(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    *,
    source: str,
    strict: bool = True,
    other_stages: Collection[str] = (),
    present: Collection[str] = (),
) -> tuple[list[str], list[str]]:
    """Raises if weights do not match a model, which may be on the meta device; returns missing and unexpected keys."""
    own = model.state_dict()
    if not isinstance(state, Mapping):
        raise CheckpointError("model.json does not describe the weights of a model. Use another step.", where=source)
    wrong = [
        f"{key}: a {type(state[key]).__name__} in the checkpoint, a tensor in the model"
        for key in state.keys() & own.keys()
        if isinstance(own[key], torch.Tensor) and not isinstance(state[key], torch.Tensor | SplitTensor)
    ]
    wrong += [
        f"{key}: {tuple(state[key].shape)} in the checkpoint, {tuple(own[key].shape)} in the model"
        for key in state.keys() & own.keys()
        if isinstance(state[key], torch.Tensor | SplitTensor) and state[key].shape != own[key].shape
    ]
    # A tied weight has several names; a state dict may contain only one of them.
    missing = sorted(own.keys() - state.keys() - {*present})
    unexpected = sorted(state.keys() - model.state_dict(keep_vars=True).keys() - {*other_stages})
    if wrong or (strict and (missing or unexpected)):
        lines = [*sorted(wrong), *(f"{key}: not in the checkpoint" for key in missing)]
        lines += [f"{key}: not in the model" for key in unexpected]
        raise CheckpointError(
            f"{source} contains another model: " + "; ".join(lines[:8]) + ("; …" if len(lines) > 8 else "")
        )
    return missing, unexpected


WEIGHTS = ("ema", "raw")
"""Which weights of a checkpoint to load: the averaged or the trained ones."""


def read_averaged(store: AnyStore, step: int, weights: str | None) -> Mapping[str, Any]:
    """Returns the averaged weights to load from a checkpoint over its trained ones; {} for the trained ones.

    `weights` is "ema", "raw", or None for those that the run's evaluations use.
    """
    if weights not in (None, *WEIGHTS):
        raise ConfigError(f"weights: {weights!r} is unknown. Use ema or raw.")
    averaged: Any = {"weights": {}, "is_evaluated": False}
    if weights != "raw" and "training" in store.parts(step):
        training = store.read_split(step, "training")
        averaged = training.get("averaged") if isinstance(training, Mapping) else None
        found = averaged.get("weights") if isinstance(averaged, Mapping) and "is_evaluated" in averaged else None
        if not isinstance(found, Mapping) or not all(
            isinstance(each, torch.Tensor | SplitTensor) for each in found.values()
        ):
            problem = "training.json does not describe the averaged weights of a run. Use another step, or weights raw."
            raise CheckpointError(problem, where=store.path(step))
    if weights == "ema" and not averaged["weights"]:
        problem = "It has no averaged weights. Use weights raw, or train with hooks: [ema]."
        raise CheckpointError(problem, where=store.path(step))
    return averaged["weights"] if averaged["is_evaluated"] or weights == "ema" else {}


@torch.no_grad()
def load_averaged(
    averaged: Mapping[str, Any], model: torch.nn.Module, *, source: object, other_stages: Collection[str] = ()
) -> None:
    """Copies averaged weights into the model in place, rounded to the dtypes of the model."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    wrong = [
        f"{name}: {tuple(value.shape)}" + (f" instead of {tuple(own[name].shape)}" if name in own else " is unknown")
        for name, value in averaged.items()
        if (name in own and own[name].shape != value.shape) or (name not in own and name not in other_stages)
    ]
    if wrong:
        raise CheckpointError(f"The averaged weights do not match the model: {'; '.join(wrong[:8])}.", where=source)
    for name, value in averaged.items():
        if name not in own:
            continue
        if isinstance(value, torch.Tensor) and is_split(value):
            local(own[name]).copy_(local(value))
        else:
            fill(own[name], value)


def _fill_shards(value: Any, own: Any) -> Any:
    """Returns the argument of load_state_dict for a key; for a tensor that is sharded on disk or here, the model's own
    tensor.

    It is filled region by region, without a second copy of the model.
    """
    if value is own:
        return own
    is_tensor = isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor | SplitTensor)
    if is_tensor and (isinstance(value, SplitTensor) or is_split(own)):
        with torch.no_grad():
            fill(own, value)
        return own
    # The state of `get_extra_state`, which may contain tensors.
    return map_tensors(value, lambda tensor, _: as_whole(tensor))


def restore_optimizers(
    state: Mapping[str, Any],
    model: torch.nn.Module,
    optimizers: Mapping[str, torch.optim.Optimizer],
    *,
    keep_settings: bool = False,
    other_stages: Collection[str] = (),
) -> None:
    """Loads the optimizers' state by parameter name; `keep_settings` keeps the settings of their groups.

    Names of `other_stages` belong to other stages of a pipeline.
    """
    if state.keys() != optimizers.keys():
        raise CheckpointError(
            f"The checkpoint contains the optimizers {', '.join(state)}, but the run has {', '.join(optimizers)}. "
            "Rename them back, or start over with --fresh."
        )
    names = _names_by_parameter(model)
    frozen = [names[id(each)] for each in model.parameters() if not each.requires_grad]
    for name, optimizer in optimizers.items():
        saved = state[name]
        if saved["class"] != type(optimizer).__name__:
            logger.warning(
                "The saved state of optimizer %s is of %s, not of %s: it starts without state.",
                name,
                saved["class"],
                type(optimizer).__name__,
            )
            continue
        if keep_settings:
            # A parameter that is frozen by a changed setting that was accepted loses its state.
            unowned = {*frozen} - {*_ordered_names(optimizer, names)}
            state_of_owned = {key: value for key, value in saved["state"].items() if key not in unowned}
            groups = _keep_settings(optimizer, saved["groups"])
            saved = {**saved, "state": state_of_owned, "groups": groups}
        if other_stages:
            saved = _select_stage(saved, optimizer, names, other_stages, keep_groups=keep_settings)
        _load_by_name(optimizer, saved, names, label=name)


def _keep_settings(optimizer: torch.optim.Optimizer, saved: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups of an optimizer with its own settings, and the other entries of the saved groups.

    Some optimizers count steps in their groups (schedulefree's `k` and `weight_sum`), which are not settings.
    """
    own = optimizer.state_dict()["param_groups"]
    settings = {"params", "param_names", "lr", "initial_lr", "fused", "foreach", "capturable"}
    settings |= {*inspect.signature(type(optimizer)).parameters}
    others = list(saved) if len(own) == len(list(saved)) else [{}] * len(own)
    return [
        {**group, **{key: value for key, value in other.items() if key in group and key not in settings}}
        for group, other in zip(own, others, strict=True)
    ]


def _select_stage(
    saved: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    other_stages: Collection[str],
    *,
    keep_groups: bool,
) -> dict[str, Any]:
    """Returns the part of an optimizer's saved state that belongs to this stage: its parameters and groups."""
    others = {*other_stages} - {*_ordered_names(optimizer, names)}
    state = {name: value for name, value in saved["state"].items() if name not in others}
    groups = saved["groups"]
    if not keep_groups:
        group_of = {name: group for group in groups for name in group["params"]}
        # A group without a parameter on this stage is found by its number, if all stages have the same groups.
        by_number = groups if len(groups) == len(optimizer.param_groups) else [None] * len(optimizer.param_groups)
        found = [
            next((group_of[name] for each in own["params"] if (name := names.get(id(each))) in group_of), other)
            for own, other in zip(optimizer.param_groups, by_number, strict=True)
        ]
        groups = [group for group in found if group is not None]
    return {**saved, "state": state, "groups": groups}


def with_full_tensors(training: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part `training` with full tensors, except in states with tensors that are sharded like the
    parameters."""
    sharded = ("hooks", "averaged", "trainer", "task")
    full = map_tensors(
        {key: value for key, value in training.items() if key not in sharded}, lambda each, _: as_whole(each)
    )
    return {**training, **full}


def restore_hooks(
    state: Mapping[str, Any], hooks: Mapping[str, Stateful], *, model: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Loads hook states; returns those without a hook, which the next checkpoint keeps."""
    state = lay_out_like(model, state)
    for key, hook in hooks.items():
        if key in state:
            hook.load_state_dict(state[key])
    unclaimed = {key: value for key, value in state.items() if key not in hooks and value}
    if unclaimed:
        logger.warning("The state of hooks that this run does not have is kept: %s", ", ".join(unclaimed))
    return unclaimed


def lay_out_like(model: torch.nn.Module | None, state: Any) -> Any:
    """Returns a state in which a tensor under a parameter's name and with its shape is sharded like the parameter.

    All others are full.
    """
    parameters = {} if model is None else dict(model.named_parameters())

    def lay_out(value: torch.Tensor | SplitTensor, key: str) -> Any:
        own = parameters.get(key)
        return as_whole(value) if own is None or own.shape != value.shape else shard_like(own, value)

    return map_tensors(state, lay_out)


def _names_by_parameter(model: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _ordered_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]


def _state_by_name(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Returns an optimizer's state dict by parameter name, so that the order of parameters may change."""
    ordered = _ordered_names(optimizer, names)
    state = optimizer.state_dict()
    groups = [{**group, "params": [ordered[number] for number in group["params"]]} for group in state["param_groups"]]
    extra = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    by_name = {ordered[number]: _take_apart(optimizer, values) for number, values in state["state"].items()}
    return {"class": type(optimizer).__name__, "state": by_name, "groups": groups, **extra}


_PARTS, _CONTEXT = "parts of a tensor", "context"


def _take_apart(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a parameter's state with the parts of quantized tensors (torchao's) instead of the tensors."""
    if not hasattr(optimizer, "_new_buffer"):
        return values
    plain = dict(values)
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__") and not is_split(value):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            plain[key] = {
                _PARTS: parts,
                _CONTEXT: [str(each) if isinstance(each, torch.dtype) else each for each in context],
            }
    return plain


def _put_together(optimizer: Any, parameter: torch.Tensor, values: Any) -> Any:
    """Reverses `_take_apart`. The class is that of the optimizer's own tensors; a file cannot name another class."""
    if not hasattr(optimizer, "_new_buffer"):
        return values
    for key, value in values.items():
        if isinstance(value, Mapping) and _PARTS in value:
            kind = type(optimizer._new_buffer(parameter.detach(), True))
            parts = {name: each.to(parameter.device) for name, each in value[_PARTS].items()}
            context = [_dtype(each) if str(each).startswith("torch.") else each for each in value[_CONTEXT]]
            values[key] = kind.__tensor_unflatten__(parts, context, None, None)
    return values


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"The optimizer's state has the dtype {name!r}, which torch does not have.")
    return dtype


def _load_by_name(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], names: Mapping[int, str], *, label: str
) -> None:
    ordered = _ordered_names(optimizer, names)
    numbers = {name: number for number, name in enumerate(ordered)}
    unknown = [name for name in saved["state"] if name not in numbers]
    if unknown:
        raise CheckpointError(
            f"The checkpoint's optimizer {label!r} has state for {', '.join(unknown[:5])}, which it does not own now. "
            "Undo the change of `match` or of the model, or start over with --fresh."
        )
    extra = {key: value for key, value in saved.items() if key not in ("class", "state", "groups")}
    own_groups = optimizer.state_dict()["param_groups"]
    if len(saved["groups"]) != len(own_groups):
        raise CheckpointError(
            f"The checkpoint's optimizer {label!r} has {len(saved['groups'])} parameter groups, but the run's has "
            f"{len(own_groups)}. Build it with the same groups, or start over with --fresh."
        )
    # The optimizer keeps its own parameters; the saved names may be those of another stage.
    kept = [{key: own[key] for key in ("params", "param_names") if key in own} for own in own_groups]
    settings = [map_tensors(group, lambda value, _: as_whole(value)) for group in saved["groups"]]
    for group, own in zip(settings, optimizer.param_groups, strict=True):  # a learning rate may be a tensor
        tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
        group.update({key: torch.as_tensor(group[key]).to(tensors[key].device) for key in tensors if key in group})
    groups = [{**group, **own} for group, own in zip(settings, kept, strict=True)]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: _put_together(
            optimizer,
            parameters[number],
            map_tensors(values, lambda value, _, own=parameters[number]: shard_like(own, value)),
        )
        for number, values in ((numbers[name], values) for name, values in saved["state"].items())
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups, **extra})
    # torch casts loaded state to the parameter's dtype, which loses bits of the fp32 state of bf16 weights.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        loaded = optimizer.state[parameters[number]]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
