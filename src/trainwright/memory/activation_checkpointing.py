"""Activation checkpointing: layers keep their inputs and run again in the backward pass.

Covers which operations keep their results (`save`), and what each choice would hold for `budget: auto`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainwright.backends.private_torch import arguments_of, tree_leaves
from trainwright.config.problems import describe, nearest
from trainwright.errors import ConfigError
from trainwright.memory.module_paths import Around, Forward, by_path, forwards_put_back, layers_of, parts_of, put_around
from trainwright.parallel.mesh import local

logger = logging.getLogger(__name__)

ATTENTION = "scaled_dot_product_attention"
_FORMS = MappingProxyType(
    {
        ATTENTION: tuple(
            f"aten::_scaled_dot_product_{kernel}"
            for kernel in (
                "flash_attention",
                "flash_attention_for_cpu",
                "efficient_attention",
                "cudnn_attention",
                "fused_attention_overrideable",
            )
        ),
    }
)
"""The operations that one call becomes, by device and shape."""
_CHANCES = ("dropout_p", "p")


def read_operations(label: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the operations with their namespaces; rejects unknown ones and those that cannot be kept."""
    if not names:
        return ()
    found: list[str] = []
    for name in names:
        full = name if "::" in name else f"aten::{name}"
        if name in _FORMS:
            found += _FORMS[name]
            continue
        overloads = _overloads(full)
        if not overloads:
            near = nearest(name, [*_FORMS, *dir(torch)])
            guess = f' Did you mean "{near}"?' if near else ""
            raise ConfigError(f'{label}: torch has no operation "{name}".{guess} Such as mm, addmm, {ATTENTION}.')
        if any(_is_composite(each) for each in overloads):
            raise ConfigError(
                f'{label}: "{name}" becomes other operations before its result could be kept. Name those, such as mm, '
                f"addmm (a linear layer with bias), bmm, {ATTENTION}."
            )
        if _is_random(overloads):
            raise ConfigError(
                f'{label}: "{name}" draws random numbers. Those behind it would be others in the recomputation. '
                "Leave it out."
            )
        found.append(full)
    return tuple(found)


class Policy:
    """Decides for each operation of a layer whether its result is kept; torch asks it in both passes alike."""

    def __init__(self, operations: Sequence[str]) -> None:
        self._operations = frozenset(operations)

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Keeps what is named, unless it draws random numbers: whatever draws after it must draw the same again."""
        name = operation.name().partition(".")[0]
        if name in self._operations and not _draws(operation, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Does this call use random numbers? Attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    for place, argument in enumerate(arguments_of(operation)):
        if argument.name in _CHANCES:
            chance = kwargs.get(argument.name, args[place] if place < len(args) else argument.default_value)
            return bool(chance)
    return True


def _is_random(overloads: Sequence[Any]) -> bool:
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads) and not any(
        argument.name == "dropout_p" for each in overloads for argument in arguments_of(each)
    )


def _is_composite(operation: Any) -> bool:
    """Does autograd see other operations in its place? No public function tells."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")


def _overloads(name: str) -> list[Any]:
    """Returns the forms of an operation by its full name; none where torch has no such operation."""
    namespace, _, base = name.partition("::")
    packet: Any = getattr(getattr(torch.ops, namespace), base, None)
    return [getattr(packet, each) for each in packet.overloads()] if hasattr(packet, "overloads") else []


LABEL = "activation_checkpointing"
WORDS = ("layers", "save", "budget", "every")
AUTO = "auto"
"""The budget that is found before a run; who meets it unfound has all layers recomputed, which needs the least."""


@dataclass(frozen=True)
class LayerCheckpointing:
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


def _put_on(chosen: Mapping[str, tuple[nn.Module, LayerCheckpointing]]) -> None:
    # One object for all layers that keep the same: compiled blocks (repeated_blocks.py) share a graph only if they
    # share it.
    contexts = {
        setting.save: partial(create_selective_checkpoint_contexts, Policy(setting.save))
        for _, setting in chosen.values()
        if setting.save
    }
    for layer, setting in chosen.values():
        put_around(layer, partial(Recomputed, contexts=contexts.get(setting.save)))


def choose_layers(
    model: nn.Module, given: Any, *, is_whole: bool = True, says: bool = True
) -> dict[str, tuple[nn.Module, LayerCheckpointing]]:
    """Returns which layers are recomputed and how, by name, changing nothing; rejects what names nothing."""
    chosen: dict[str, tuple[nn.Module, LayerCheckpointing]] = {}
    for path, own in by_path(LABEL, given, WORDS).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        setting = read_activation_checkpointing(label, own)
        for part in parts_of(label, model, path, is_whole=is_whole):
            named = layers_of(label, model, part, setting.layers, is_whole=is_whole)
            picked = _pick(named, setting)
            if says:
                _tell(label, named, picked)
            for name in picked:
                _reject_overlap(label, name, chosen)
                chosen[name] = (named[name], setting)
    return chosen


def read_activation_checkpointing(label: str, given: Any) -> LayerCheckpointing:
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
    return LayerCheckpointing(layers, read_operations(f"{label}.save", operations), float(budget), every)


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


def _pick(named: Mapping[str, nn.Module], setting: LayerCheckpointing) -> list[str]:
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


def _reject_overlap(label: str, name: str, chosen: Iterable[str]) -> None:
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


_GRAIN = 10_000  # shares are written to a run's settings, with four digits


def has_auto(given: Any) -> bool:
    """Does a setting of `model.activation_checkpointing`, or of a part of it, leave its budget to be found?"""
    if not isinstance(given, Mapping):
        return False
    budget = given.get("budget")
    return (isinstance(budget, str) and budget == AUTO) or any(map(has_auto, given.values()))


def with_budget(given: Any, share: float) -> Any:
    """Returns the setting with a share in the place of every `auto`; a share for all of them."""
    if not isinstance(given, Mapping):
        return given
    return {
        key: share if key == "budget" and value == AUTO else with_budget(value, share) for key, value in given.items()
    }


def only_auto(given: Any) -> Any:
    """Returns of the setting what has a budget that is to be found; None where nothing has."""
    return _part(given, wants_auto=True)


def without_auto(given: Any) -> Any:
    """Returns of the setting what is told already; None where nothing is."""
    return _part(given, wants_auto=False)


def _part(given: Any, *, wants_auto: bool) -> Any:
    if not has_auto(given):
        return None if wants_auto else given
    if given.get("budget") == AUTO:
        return given if wants_auto else None
    parts = {path: _part(setting, wants_auto=wants_auto) for path, setting in given.items()}
    return {path: setting for path, setting in parts.items() if setting is not None} or None


def shares_of(model: nn.Module, given: Any) -> list[float]:
    """Returns the shares that make a difference, ascending, from 0 (all are recomputed) to 1 (none is)."""
    layers = choose_layers(model, with_budget(given, 0.0), says=False)
    counts = Counter(kind_of(layer) for layer, _ in layers.values())
    # Rounded up, so that the share of so many layers has them all.
    shares = {math.ceil(number * _GRAIN / count) / _GRAIN for count in counts.values() for number in range(count + 1)}
    by_number = {num_recomputed(model, given, share): share for share in sorted(shares | {0.0, 1.0}, reverse=True)}
    return sorted(by_number.values())


def num_recomputed(model: nn.Module, given: Any, share: float) -> int:
    """Returns how many layers are recomputed with this share."""
    return len(choose_layers(model, with_budget(given, share), says=False))


@contextmanager
def counting_held_bytes(model: nn.Module, given: Any) -> Iterator[dict[str, int]]:
    """Gives a mapping from each layer that could be recomputed to the bytes that its forward leaves for the backward.

    It is filled when the layer is first called within. The layer then runs once more, and what it would hold is
    counted and dropped, so that counting takes the memory of one operation. Weights and inputs, which are held in any
    case, do not count.
    """
    layers = {name: layer for name, (layer, _) in choose_layers(model, with_budget(given, 0.0), says=False).items()}
    weights = frozenset(_storage(each) for each in [*model.parameters(), *model.buffers()])
    held: dict[str, int] = {}
    with forwards_put_back(layers.values()):
        for name, layer in layers.items():
            put_around(layer, partial(_Counted, note=partial(_note_largest, held, name), weights=weights))
        yield held


class _Counted(Around):
    """A forward that tells once how much it would hold."""

    def __init__(self, forward: Forward, *, note: Callable[[int], None], weights: frozenset[StorageWeakRef]) -> None:
        super().__init__(forward)
        self._note = note
        self._weights = weights
        self._has_counted = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._has_counted:
            self._has_counted = True
            inputs = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            self._note(_held_bytes(lambda: self.inner(*args, **kwargs), self._weights | inputs))
        return self.inner(*args, **kwargs)


def _note_largest(held: dict[str, int], name: str, num_bytes: int) -> None:
    held[name] = max(num_bytes, held.get(name, 0))


def _held_bytes(run: Callable[[], Any], known: frozenset[StorageWeakRef]) -> int:
    seen: set[StorageWeakRef] = set()
    total = 0

    def count(tensor: Tensor) -> None:
        nonlocal total
        storage = _storage(tensor)
        if storage not in known and storage not in seen:
            seen.add(storage)
            total += local(tensor).untyped_storage().nbytes()

    with saved_tensors_hooks(count, _reject):
        run()
    return total


def _reject(packed: Any) -> Tensor:
    raise AssertionError("what was counted is not there any more, and nobody asks for it")


def _storage(tensor: Tensor) -> StorageWeakRef:
    """Returns what the storage is known by, also after it was dropped: no later one is equal to it."""
    return StorageWeakRef(local(tensor).untyped_storage())  # type: ignore[no-untyped-call]
