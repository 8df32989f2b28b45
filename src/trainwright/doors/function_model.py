"""The model of the door for functions: made or taken, given its weights, changed by the user's function.

a class:     model_cls(args), or model_cls() where its first parameter is not called args
an object:   itself, in training mode
finetune:    the weights of --load, then init_function(args, model), which changes what it is given
inference:   init_function(args, model), then the weights of --load: they are of a model that it has changed already
then:        what stays untrained, --checkpoint-activations

What --mode pretrain begins with is begin_from.py's.
"""

from __future__ import annotations

import argparse
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint import contents
from trainwright.checkpoint.folder import find_run, read_config
from trainwright.checkpoint.listing import checkpoints_place
from trainwright.checkpoint.manifest import MANIFEST
from trainwright.checkpoint.open_store import AnyStore, open_store
from trainwright.checkpoint.resume import pick_step
from trainwright.config import Origin
from trainwright.errors import CheckpointError, ConfigError
from trainwright.memory.remat import recompute_layers
from trainwright.models.model import Model
from trainwright.models.pretrained import INDEX_FILE, WEIGHTS_FILE, load_weights
from trainwright.optim.param_groups import disable_untrainable_params
from trainwright.user_code import caller, name_of, parameters_of, place_of

logger = logging.getLogger(__name__)

InitFunction = Callable[[argparse.Namespace, torch.nn.Module], Any]


def make_model(
    model_cls: Any, args: argparse.Namespace, flags: argparse.Namespace, init_function: InitFunction | None
) -> torch.nn.Module:
    """Returns the model as it is just before training; a checkpoint of the run itself is restored after this."""
    model = model_cls.train() if isinstance(model_cls, torch.nn.Module) else _constructed(model_cls, args)
    if flags.load is not None and flags.mode == "finetune":
        load_into(model, Path(flags.load), strict=False)
    if init_function is not None:
        init_function(args, model)
    if flags.load is not None and flags.mode == "inference":
        load_into(model, Path(flags.load), strict=True)
    disable_untrainable_params(model)
    if flags.checkpoint_activations:
        _recompute(model)
    return model


def _constructed(model_cls: Any, args: argparse.Namespace) -> torch.nn.Module:
    if not callable(model_cls):
        problem = f"model_cls is {model_cls!r}. Give a class, a function that makes a model, or a model."
        raise ConfigError(problem, where=caller())
    given = (args,) if _takes_args(model_cls) else ()
    try:
        inspect.signature(model_cls).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"{name_of(model_cls)} is called with {'args' if given else 'nothing'}, and that does not fit: {error}. "
            "Call its first parameter args, give the others defaults, or pass a model that is made already.",
            where=place_of(model_cls),
        ) from error
    except ValueError:
        """Python knows no signature of it: it will say itself what it lacks."""
    model = model_cls(*given)
    if not isinstance(model, torch.nn.Module):
        problem = f"{name_of(model_cls)} made a {type(model).__name__}, which is no torch.nn.Module."
        raise ConfigError(problem, where=place_of(model_cls))
    return model


def _takes_args(model_cls: Any) -> bool:
    """Is the first parameter called args? `*args` is not: it stands for any."""
    first = next(iter((parameters_of(model_cls) or {}).values()), None)
    return first is not None and first.name == "args" and first.kind is not first.VAR_POSITIONAL


def _recompute(model: torch.nn.Module) -> None:
    names = list(_layers(model))
    if not names:
        raise ConfigError(
            f"--checkpoint-activations: {type(model).__name__} has no ModuleList of layers that could be recomputed. "
            "Leave it out, or keep the layers in one.",
            where=caller(),
        )
    recompute_layers(model, names)


def _layers(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of the members of the outermost ModuleLists."""
    for name, child in module.named_children():
        if isinstance(module, torch.nn.ModuleList) and type(child).forward is not torch.nn.Module.forward:
            yield f"{prefix}{name}"
        else:
            yield from _layers(child, f"{prefix}{name}.")


def load_into(model: torch.nn.Module, path: Path, *, strict: bool) -> None:
    """Gives a model the weights of a run, of one of its checkpoints, or of a folder of safetensors.

    Without `strict` a model may have other parts, such as a new head: what is missing or too much is said. A file
    that has nothing of the model is refused all the same.
    """
    if _holds_weights_alone(path):
        key_map = type(model).key_map() if isinstance(model, Model) else None
        missing = load_weights(model, path, key_map=key_map, strict=strict).missing
    else:
        store, step = find_checkpoint(path)
        missing = tuple(model.state_dict().keys() - store.read_split(step, "model").keys())
        if len(missing) < len(model.state_dict()):
            contents.restore_model(store, step, model, strict=strict)
        path = Path(str(store.path(step)))
    if len(missing) == len(model.state_dict()):
        problem = f"{path} holds no weight of {type(model).__name__}. Name another, or leave it out."
        raise CheckpointError(problem, where=Origin.parse(caller(), "--load"))
    logger.info("Loaded the weights of %s", path)


def find_checkpoint(path: Path) -> tuple[AnyStore, int]:
    """Returns where the checkpoint lies that --load names: the newest of a run, or the one itself."""
    if _holds_weights_alone(path):
        raise CheckpointError(
            f"{path} holds weights alone, and --mode pretrain goes on from a whole state. Use --mode finetune.",
            where=Origin.parse(caller(), "--load"),
        )
    folder, step = find_run(path, where=Origin.parse(caller(), "--load"))
    config = read_config(folder)
    assert config is not None  # find_run saw it
    store = open_store(checkpoints_place(folder, config))
    return store, pick_step(store, "latest" if step is None else step, best=None)


def _holds_weights_alone(path: Path) -> bool:
    has_weights = (path / WEIGHTS_FILE).is_file() or (path / INDEX_FILE).is_file()
    return has_weights and not (path / MANIFEST).exists()
