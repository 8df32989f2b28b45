"""Chooses the linear layers of a model that train in fp8 (`runtime.precision: fp8`), and changes their class.

By default these are the layers inside of blocks that are large enough to gain, except for the first and the last block,
where rounding errors affect the loss most. The layers themselves are in layers/fp8_linear.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainwright.errors import ConfigError
from trainwright.models.layers.fp8_linear import MULTIPLE, Fp8Linear, Fp8LoRALinear, Recipe
from trainwright.models.layers.quantized_linear import is_quantized
from trainwright.models.lora import LoRALinear, is_conv1d
from trainwright.models.names import last_parts, names_module, unmatched

SMALLEST_GAIN = 1000
"""The smallest N·K / (N + K) of a layer from K to N values that is fp8 by default; a square layer of width 2000.

Per token, fp8 saves time on 6·N·K operations, and its casts move about six bytes for each of the N + K values. By this
count 400 would be sufficient, but the compiler also recomputes expensive functions such as GELU in the casting kernels.
On an H200, fp8 shortens a step of TinyLlama (values of 1,024 and more) by a fifth and lengthens one of GPT-2 small
(values up to 614) by 4 % (benchmarks/results/gpu.md)."""

_PLAIN = {nn.Linear: Fp8Linear, LoRALinear: Fp8LoRALinear}
"""The classes of layers that can be fp8, with the class that replaces each."""


@dataclass(frozen=True)
class Fp8Layers:
    """The names of the layers in fp8, and of all other linear layers by the reason why they stay in bf16."""

    recipe: Recipe
    chosen: tuple[str, ...]
    left: Mapping[str, tuple[str, ...]]

    def describe(self) -> str:
        """Returns one line for the log, in which layers with the same last name are listed once."""
        number = len(self.chosen) + sum(map(len, self.left.values()))
        text = f"{len(self.chosen)} of {number} linear layers train in fp8 ({self.recipe}): {last_parts(self.chosen)}"
        return f"{text}. In bf16: {self.describe_left()}." if self.left else f"{text}."

    def describe_left(self) -> str:
        """Returns the layers in bf16 with the reasons."""
        return "; ".join(f"{len(names)} {reason}: {last_parts(names)}" for reason, names in self.left.items())


def use_fp8(
    model: nn.Module,
    *,
    recipe: Recipe = "tensorwise",
    match: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    origin: Callable[[str], object | None] = lambda name: None,
) -> Fp8Layers:
    """Makes linear layers of a model train in fp8, in place, and returns which.

    `match` are globs of module paths. Layers that match are fp8 even if they are small, outside of the blocks, or in
    the first or last block; all others stay in bf16. `skip` are globs of layers that stay in bf16. Raises if a glob
    matches no linear layer, and if no layer would be fp8. Names, parameters and hooks do not change.
    """
    layers = choose_layers(model, recipe=recipe, match=match, skip=skip, origin=origin)
    modules = dict(model.named_modules())
    for name in layers.chosen:
        layer: Any = modules[name]
        # As in models/lora.py: changing the class keeps hooks, and a layer that the model has twice is still one layer.
        layer.__class__ = _PLAIN[type(layer)]
        layer.fp8_recipe = recipe
    return layers


def gains_from_fp8(model: nn.Module) -> bool:
    """Returns True if a layer of the model would train in fp8 by default."""
    linear = _linear_layers(model)
    return any(not reason and not _why_impossible(linear[name]) for name, reason in _defaults(model, linear))


def choose_layers(
    model: nn.Module,
    *,
    recipe: Recipe,
    match: Sequence[str] | None,
    skip: Sequence[str],
    origin: Callable[[str], object | None],
) -> Fp8Layers:
    """Returns what `use_fp8` would change."""
    linear = _linear_layers(model)
    for label, globs in (("runtime.fp8.match", match or ()), ("runtime.fp8.skip", skip)):
        for glob in globs:
            if not any(names_module(glob, name) for name in linear):
                raise ConfigError(f"{label}: {unmatched(glob, linear, 'linear layer')}", where=origin(label))
    impossible = {name: reason for name, layer in linear.items() if (reason := _why_impossible(layer))}
    for glob in match or ():
        found = [name for name in linear if names_module(glob, name)]
        if all(name in impossible for name in found):
            raise ConfigError(
                f"runtime.fp8.match: {glob!r} matches no layer that can be fp8: {found[0]} is not, because it is "
                f"{impossible[found[0]]}. Remove the glob.",
                where=origin("runtime.fp8.match"),
            )
    reasons = dict.fromkeys(linear, "not in runtime.fp8.match") if match else dict(_defaults(model, linear))
    for name in [name for name in linear if any(names_module(glob, name) for glob in match or ())]:
        reasons[name] = ""
    reasons |= {name: "in runtime.fp8.skip" for name in linear if any(names_module(glob, name) for glob in skip)}
    reasons |= impossible
    left: dict[str, list[str]] = defaultdict(list)
    for name, reason in reasons.items():
        if reason:
            left[reason].append(name)
    layers = Fp8Layers(
        recipe,
        tuple(name for name, reason in reasons.items() if not reason),
        {reason: tuple(names) for reason, names in left.items()},
    )
    if not layers.chosen:
        problem = f"All stay in bf16: {layers.describe_left()}." if linear else "The model has none."
        advice = "Name layers with runtime.fp8.match, or use" if linear else "Use"
        raise ConfigError(
            f"runtime.precision: fp8, but no linear layer would train in fp8. {problem} {advice} precision: bf16.",
            where=origin("runtime.precision"),
        )
    return layers


def _linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, nn.Linear) or is_conv1d(module)}


def _why_impossible(layer: nn.Module) -> str:
    if is_conv1d(layer):
        return "a Conv1D of transformers (the model type gpt2 has the same weights in linear layers)"
    if is_quantized(layer):
        return "quantized (model.quantize), and multiplied in bf16"
    if type(layer) not in _PLAIN:
        return f"of the class {type(layer).__name__}, whose forward fp8 would replace"
    sizes = (layer.in_features, layer.out_features)
    if any(not isinstance(size, int) or size % MULTIPLE for size in sizes):
        return f"of a size that is not divisible by {MULTIPLE}"
    return ""


def _defaults(model: nn.Module, linear: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    """Yields the name of each layer with the reason why it is not fp8 by default, or an empty string if it is."""
    inside, outer = _blocks(model, linear)
    # Layers of one module with the same number of inputs usually read the same tensor (queries, keys and values; gate
    # and up), so their outputs are added.
    widths_out: dict[tuple[str, int], int] = defaultdict(int)
    for name, layer in linear.items():
        if isinstance(layer, nn.Linear):
            widths_out[name.rpartition(".")[0], layer.in_features] += layer.out_features
    for name, layer in linear.items():
        width_in = layer.in_features if isinstance(layer, nn.Linear) else 0
        width_out = widths_out[name.rpartition(".")[0], width_in]
        if name not in inside:
            yield name, "outside of the blocks"
        elif name in outer:
            yield name, "in the first or last block"
        else:
            has_gain = width_in * width_out >= SMALLEST_GAIN * (width_in + width_out)
            yield name, "" if has_gain else "too small to gain"


def _blocks(model: nn.Module, linear: Mapping[str, nn.Module]) -> tuple[set[str], set[str]]:
    """Returns the names of the linear layers inside of blocks, and those inside of the first or last of a stack.

    A stack is an outermost ModuleList or Sequential; its members with linear layers are the blocks.
    """
    inside: set[str] = set()
    outer: set[str] = set()

    def within(prefix: str) -> set[str]:
        return {name for name in linear if name == prefix or name.startswith(f"{prefix}.")}

    def visit(path: str, module: nn.Module) -> None:
        members = {f"{path}.{name}" if path else name: child for name, child in module.named_children()}
        members = {name: child for name, child in members.items() if within(name)}
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(members) > 1:
            names = list(members)
            inside.update(*(within(name) for name in names))
            outer.update(within(names[0]), within(names[-1]))
            return
        for name, child in members.items():
            visit(name, child)

    visit("", model)
    return inside, outer
