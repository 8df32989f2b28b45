"""Recomputation: layers keep only their inputs in the forward pass, and run once more in the backward pass.

    model.remat: [DecoderLayer]
    model.remat: {layers: [DecoderLayer], save: [mm, scaled_dot_product_attention]}
    model.remat: {layers: [DecoderLayer], budget: 0.5}
    model.remat: {layers: [DecoderLayer], budget: auto}

The engine is torch.utils.checkpoint, without re-entry, with the random numbers of the first pass: losses and gradients
are those of a run without it, bit for bit. Which operations may be kept is in saved_operations.py. With `auto` as few
layers are recomputed as memory allows; how that number is found is in remat_budget.py and loop/remat_fitting.py.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from trainwright.config.problems import describe
from trainwright.errors import ConfigError
from trainwright.memory.forwards import Around, Forward, forwards_put_back, put_around
from trainwright.memory.places import by_path, layers_of, parts_of
from trainwright.memory.saved_operations import Policy, read_operations

logger = logging.getLogger(__name__)

LABEL = "remat"
WORDS = ("layers", "save", "budget", "every")
AUTO = "auto"
"""The budget that is found before a run; who meets it unfound has all layers recomputed, which needs the least."""


@dataclass(frozen=True)
class Remat:
    """What of a model, or of a part of it, is recomputed."""

    layers: tuple[str, ...]
    """Class names, or globs over module names."""
    save: tuple[str, ...] = ()
    """Operations (aten names) whose results a recomputed layer keeps all the same."""
    budget: float = 0.0
    """The share of what these layers would hold without recomputation that may be held; with 1 none is recomputed."""
    every: int = 1
    """Of so many layers in a row the first is recomputed."""


def recompute_layers(model: nn.Module, given: Any, *, is_whole: bool = True) -> list[str]:
    """Has the layers that a setting names recomputed, in place; returns their names, in the model's order."""
    chosen = choose_layers(model, given, is_whole=is_whole)
    _put_on(chosen)
    return list(chosen)


@contextmanager
def recomputed_within(model: nn.Module, given: Any) -> Iterator[None]:
    """Has the layers that a setting names recomputed within, and says nothing of it."""
    chosen = choose_layers(model, given, says=False)
    with forwards_put_back(layer for layer, _ in chosen.values()):
        _put_on(chosen)
        yield


def _put_on(chosen: Mapping[str, tuple[nn.Module, Remat]]) -> None:
    # One object for all layers that keep the same: compiled blocks (scan.py) share a graph only if they share it.
    contexts = {
        setting.save: partial(create_selective_checkpoint_contexts, Policy(setting.save))
        for _, setting in chosen.values()
        if setting.save
    }
    for layer, setting in chosen.values():
        put_around(layer, partial(Recomputed, contexts=contexts.get(setting.save)))


def choose_layers(
    model: nn.Module, given: Any, *, is_whole: bool = True, says: bool = True
) -> dict[str, tuple[nn.Module, Remat]]:
    """Returns which layers are recomputed and how, by name, changing nothing; refuses what names nothing."""
    chosen: dict[str, tuple[nn.Module, Remat]] = {}
    for path, own in by_path(LABEL, given, WORDS).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        setting = read_remat(label, own)
        for part in parts_of(label, model, path, is_whole=is_whole):
            named = layers_of(label, model, part, setting.layers, is_whole=is_whole)
            picked = _pick(named, setting)
            if says:
                _tell(label, named, picked)
            for name in picked:
                _refuse_overlap(label, name, chosen)
                chosen[name] = (named[name], setting)
    return chosen


def read_remat(label: str, given: Any) -> Remat:
    """Reads the setting of one place: a name, a list of names, or a mapping with `layers`."""
    settings = given if isinstance(given, Mapping) else {"layers": given}
    unknown = [key for key in settings if key not in WORDS]
    if unknown or "layers" not in settings:
        wrong = f"{unknown[0]} is unknown" if unknown else "it says not which layers"
        raise ConfigError(f"{label}: {wrong}. Give class names or globs, or {{layers: …}} with {', '.join(WORDS[1:])}.")
    if "budget" in settings and "every" in settings:
        raise ConfigError(f"{label}: budget and every both say how many layers are recomputed. Keep one of the two.")
    budget, every = settings.get("budget", 0.0), settings.get("every", 1)
    if budget == AUTO:
        budget = 0.0
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
        raise ConfigError(f"{label}.budget: must be a share from 0 to 1, or auto; got {describe(budget)}.")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"{label}.every: must be a whole number from 1 on; got {describe(every)}.")
    layers = _words(f"{label}.layers" if isinstance(given, Mapping) else label, settings["layers"])
    operations = _words(f"{label}.save", settings["save"]) if "save" in settings else ()
    return Remat(layers, read_operations(f"{label}.save", operations), float(budget), every)


class Recomputed(Around):
    """A forward that keeps its inputs and, where a policy says so, some results; the rest is computed twice."""

    def __init__(self, forward: Forward, contexts: Callable[[], Any] | None = None) -> None:
        """`contexts` gives those of the first pass and of the recomputation, by which results are kept."""
        super().__init__(forward)
        # No key where there are none: torch.compile does not know torch's own default.
        self._contexts: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward; without gradients there is nothing to hold, nor to recompute."""
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # torch looks only at positional tensors: for the device whose random numbers must repeat, and as inputs that
        # are saved by way of hooks (offload.py).
        names = tuple(kwargs)
        return checkpoint(self._run, names, *args, *kwargs.values(), use_reentrant=False, **self._contexts)

    def _run(self, names: tuple[str, ...], *values: Any) -> Any:
        num_positional = len(values) - len(names)
        return self.inner(*values[:num_positional], **dict(zip(names, values[num_positional:], strict=True)))


def _pick(named: Mapping[str, nn.Module], setting: Remat) -> list[str]:
    """Returns the names of the layers to be recomputed.

    With a budget each kind of layer (of one class, with equal weights) keeps its share of whole layers, as equal
    layers hold equally much. The last ones are kept: their backward comes first, so that what they hold is gone
    before the first recomputation needs room.
    """
    if setting.every > 1:
        return [name for number, name in enumerate(named) if number % setting.every == 0]
    kinds: dict[Any, list[str]] = {}
    for name, layer in named.items():
        kinds.setdefault(kind_of(layer), []).append(name)
    # A share of 1/49 times 49 is a little less than 1.
    kept = {
        name
        for names in kinds.values()
        for name in names[len(names) - math.floor(setting.budget * len(names) + 1e-9) :]
    }
    return [name for name in named if name not in kept]


def kind_of(layer: nn.Module) -> Any:
    """Returns what is equal for layers that hold equally much: of one class, with weights of the same shapes."""
    shapes = tuple((name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters())
    return type(layer), shapes


def _tell(label: str, named: Mapping[str, nn.Module], picked: Iterable[str]) -> None:
    counts = Counter(type(layer).__name__ for layer in named.values())
    recomputed = Counter(type(named[name]).__name__ for name in picked)
    for kind, count in counts.items():
        logger.info("model.%s: %d of %d %s are recomputed in the backward pass.", label, recomputed[kind], count, kind)


def _refuse_overlap(label: str, name: str, chosen: Iterable[str]) -> None:
    for other in chosen:
        if name == other or f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}."):
            raise ConfigError(
                f"{label}: {name or 'the model'} is recomputed already, by way of {other or 'the model'}."
            )


def _words(label: str, given: Any) -> tuple[str, ...]:
    words = (given,) if isinstance(given, str) else given
    if not isinstance(words, list | tuple) or not words or not all(isinstance(word, str) and word for word in words):
        raise ConfigError(f"{label}: must be a name or a list of names; got {describe(given)}.")
    return tuple(words)
