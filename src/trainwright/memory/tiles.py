"""Runs token-wise layers in tiles of tokens, so that the intermediate tensors of one tile are in memory at a time.

A layer is token-wise if its output at a position depends on its input at that position alone: an MLP or a norm, but
not attention. The backward pass runs each tile again, and sums the gradients of weights over tiles in fp32 at least.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, get_device_states, set_device_states

from trainwright.backends.private_torch import FakeTensor
from trainwright.config.problems import describe
from trainwright.errors import ConfigError
from trainwright.memory.activation_checkpointing import kind_of
from trainwright.memory.module_paths import (
    Around,
    Forward,
    by_path,
    layers_of,
    parts_of,
    put_around,
    read_layers,
    reject_overlap,
)
from trainwright.parallel.mesh import is_split

logger = logging.getLogger(__name__)

LABEL = "tile"
KEYS = ("layers", "tokens")
DEFAULT_TOKENS = 8192
"""Tiles of the MLP of an 8B Llama then need about 2 GiB, and its matrix products are as fast as those of all tokens."""
_EXAMPLE, _SLICE = 6, slice(2, 5)  # tokens of the example that checks a layer
_TOLERANCE = 1e-3
_MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.MultiheadAttention, nn.RNNBase)


@dataclass(frozen=True)
class TileSettings:
    """The layers of a model or submodule that run in tiles, and the size of a tile."""

    layers: tuple[str, ...]
    """Class names, or globs over module names."""
    tokens: int = DEFAULT_TOKENS


def tile_layers(model: nn.Module, given: Any, *, is_whole: bool = True, where: object | None = None) -> list[str]:
    """Makes the layers of a setting run in tiles, in place; returns their names, in the model's order."""
    chosen = choose_tiled(model, given, is_whole=is_whole)
    for name, (layer, setting) in chosen.items():
        put_around(layer, partial(Tiled, layer=layer, name=name, tokens=setting.tokens, where=where))
    counts = Counter((type(layer).__name__, setting.tokens) for layer, setting in chosen.values())
    for (kind, tokens), count in counts.items():
        logger.info("model.%s: %d %s run in tiles of up to %d tokens.", LABEL, count, kind, tokens)
    return list(chosen)


def choose_tiled(model: nn.Module, given: Any, *, is_whole: bool = True) -> dict[str, tuple[nn.Module, TileSettings]]:
    """Returns the layers to tile with their settings, by name, without a change; rejects those that mix tokens."""
    chosen: dict[str, tuple[nn.Module, TileSettings]] = {}
    checked = set()
    for path, own in by_path(LABEL, given, KEYS).items():
        label = f'{LABEL}."{path}"' if path else LABEL
        setting = read_tile(label, own)
        for submodule in parts_of(label, model, path, is_whole=is_whole):
            for name, layer in layers_of(label, model, submodule, setting.layers, is_whole=is_whole).items():
                reject_overlap(label, name, chosen, change="tiled")
                chosen[name] = (layer, setting)
                if kind_of(layer) not in checked:
                    checked.add(kind_of(layer))
                    reject_mixing(label, name, layer)
    return chosen


def read_tile(label: str, given: Any) -> TileSettings:
    """Reads one setting: a name, a list of names, or a mapping with `layers`."""
    layers, settings = read_layers(label, given, KEYS, example=f"{{layers: …, tokens: {DEFAULT_TOKENS}}}")
    tokens = settings.get("tokens", DEFAULT_TOKENS)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"{label}.tokens: must be an integer of at least 1; got {describe(tokens)}.")
    return TileSettings(layers, tokens)


def reject_mixing(label: str, name: str, layer: nn.Module) -> None:
    """Raises if a layer is not token-wise: its output for some tokens must be that part of its output for all tokens.

    Runs the layer, without dropout, on a small example with random weights, because with its own weights the output may
    be 0. Layers without values (on the meta device, or of an estimate) are not run.
    """
    for child in layer.modules():
        if isinstance(child, _MIXING):
            raise ConfigError(
                f"{label}: {name or 'the model'} is not token-wise: it has a {type(child).__name__}, which combines "
                "tokens. Use layers that map each token by itself, such as the MLP."
            )
    weights = dict(layer.named_parameters())
    if any(is_split(weight) for weight in weights.values()):
        raise ConfigError(
            f"{label}: the weights of {name} are sharded along tensor, and its tokens cannot be tiled. Remove "
            f"model.{LABEL}, or use another axis of runtime.mesh."
        )
    tensors = [*weights.values(), *layer.buffers()]
    if any(each.is_meta or isinstance(each, FakeTensor) for each in tensors):
        return
    device = tensors[0].device if tensors else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    drawn = {
        key: draw(*weight.shape, scale=max(weight.shape[-1:], default=1) ** -0.5)
        for key, weight in weights.items()
        if weight.is_floating_point()
    }
    failure: Exception | None = None
    with _evaluating(layer), torch.no_grad(), torch.autocast(device.type, enabled=False):
        for width in _widths(layer):
            example = draw(1, _EXAMPLE, width)
            try:
                whole = functional_call(layer, drawn, (example,))
                part = functional_call(layer, drawn, (example[:, _SLICE],))
            except Exception as error:  # any error of a user's layer for a wrong width
                failure = failure or error
                continue
            _compare(label, name, example, whole, part)
            return
    raise ConfigError(
        f"{label}: {name} cannot be tiled: a call with one tensor [1, {_EXAMPLE}, width] fails"
        + (f" with {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}" if failure else "")
        + ". Use layers that map one tensor to one, such as the MLP."
    )


def _widths(layer: nn.Module) -> Iterable[int]:
    """Returns the possible widths of a layer's input, the likeliest first."""
    found: dict[int, None] = {}
    for each in layer.modules():
        for given in (getattr(each, "in_features", None), getattr(each, "normalized_shape", (None,))[-1]):
            if isinstance(given, int):
                found[given] = None
    for weight in layer.parameters():
        found |= dict.fromkeys(weight.shape[:2] if weight.is_floating_point() else ())
    return found or [8]


def _compare(label: str, name: str, example: Tensor, whole: Any, part: Any) -> None:
    if not isinstance(whole, Tensor) or not isinstance(part, Tensor) or whole.shape[:2] != example.shape[:2]:
        shown = f"a tensor {list(whole.shape)}" if isinstance(whole, Tensor) else f"a {type(whole).__name__}"
        raise ConfigError(
            f"{label}: {name} cannot be tiled: for a tensor {list(example.shape)} it returns {shown}. Use layers "
            "that map one tensor [B, S, …] to one of the same B and S."
        )
    expected, found = whole[:, _SLICE].double(), part.double()
    is_equal = found.shape == expected.shape and torch.allclose(
        found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * float(expected.abs().max())
    )
    if not is_equal:
        raise ConfigError(
            f"{label}: {name} is not token-wise: its output for some tokens depends on the others. Use "
            "layers that map each token by itself, such as the MLP."
        )


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    """Disables dropout of a layer."""
    were_training = [each for each in layer.modules() if each.training]
    try:
        layer.eval()
        yield
    finally:
        for each in were_training:
            each.training = True


class Tiled(Around):
    """A forward that runs once for each tile of tokens (dim 1), in the forward and again in the backward pass."""

    def __init__(self, forward: Forward, *, layer: nn.Module, name: str, tokens: int, where: object | None) -> None:
        super().__init__(forward)
        self._layer = layer
        self._name = name
        self._tokens = tokens
        self._where = where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Maps a tensor [B, S, …] to one of the same B and S."""
        values = [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], Tensor) or values[0].dim() < 2:
            shown = [f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else describe(each) for each in values]
            given = ", ".join(shown)
            raise ConfigError(
                f"model.{LABEL}: {self._name} is called with {given or 'no argument'}, but a tiled layer maps one "
                "tensor [B, S, …]. Use a layer inside or around it.",
                where=self._where,
            )
        run = partial(_call, self.inner, tuple(kwargs))
        hidden = values[0]
        # Without a batch, as in a layer that flattens it, tokens are dim 0.
        dim = 1 if hidden.dim() > 2 else 0
        num_rows = hidden.shape[0] if dim else 1
        size = max(self._tokens // num_rows, 1)
        if hidden.shape[dim] <= size:
            return run(hidden)
        if torch.compiler.is_compiling():
            # The compiler does not support a backward inside of a backward; it traces the recomputation instead.
            tiles = [tile.contiguous() for tile in torch.split(hidden, size, dim)]
            if torch.is_grad_enabled():
                return torch.cat([checkpoint(run, tile, use_reentrant=False) for tile in tiles], dim)
            return torch.cat([run(tile) for tile in tiles], dim)
        if not torch.is_grad_enabled():
            return _run_tiles(run, hidden, size, dim, lambda: None)
        trained = [weight for weight in self._layer.parameters() if weight.requires_grad]
        apply: Callable[..., Tensor] = _Tiles.apply  # torch has no types here
        return apply(hidden, run, size, dim, *trained)


def _call(forward: Forward, names: tuple[str, ...], hidden: Tensor) -> Any:
    return forward(**{names[0]: hidden}) if names else forward(hidden)


def _run_tiles(
    run: Callable[[Tensor], Tensor], hidden: Tensor, size: int, dim: int, before_each: Callable[[], None]
) -> Tensor:
    """Returns the output of all tiles; written into one tensor, since a concatenation would need twice the memory."""
    whole: Tensor | None = None
    for start in range(0, hidden.shape[dim], size):
        tile = hidden.narrow(dim, start, min(size, hidden.shape[dim] - start))
        before_each()
        output = run(tile.contiguous()).detach()  # a copy with several rows; some layers call view
        if whole is None:
            whole = output.new_empty((*hidden.shape[: dim + 1], *output.shape[dim + 1 :]))
        whole.narrow(dim, start, tile.shape[dim]).copy_(output)
        del output
    assert whole is not None
    return whole


class _RandomState:
    """The state of torch's generators, of the CPU and of the device of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.get_rng_state()
        self._devices, self._states = get_device_states(tensor)
        self._kind = tensor.device.type

    def restore(self) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self._host)
        if self._devices:
            set_device_states(self._devices, self._states, device_type=self._kind)


class _Tiles(torch.autograd.Function):
    """Keeps the input, and recomputes a tile at a time.

    Unlike a checkpoint for each tile, it does not round the sums of gradients over tiles to a 16-bit dtype, and needs
    no second copy of the output or of the input's gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, run: Callable[[Tensor], Tensor], size: int, dim: int, *trained: Tensor
    ) -> Tensor:
        """Returns the output of all tiles; `trained` are the weights that get gradients."""
        ctx.run, ctx.size, ctx.dim, ctx.trained = run, size, dim, trained
        kind = hidden.device.type
        ctx.autocast = {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        ctx.states = []
        ctx.save_for_backward(hidden)
        # With gradients, because layers in fp8 compute in bf16 without; the graph of a tile is dropped.
        with torch.enable_grad(), saved_tensors_hooks(_same, _same):
            return _run_tiles(run, hidden.detach(), size, dim, lambda: ctx.states.append(_RandomState(hidden)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the gradients of the input and of the trained weights."""
        [hidden] = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[0]
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        after = _RandomState(hidden)
        with torch.autocast(**ctx.autocast):
            for number, start in enumerate(range(0, hidden.shape[ctx.dim], ctx.size)):
                length = min(ctx.size, hidden.shape[ctx.dim] - start)
                ctx.states[number].restore()
                tile = hidden.narrow(ctx.dim, start, length).detach().contiguous().requires_grad_(needs_hidden)
                with torch.enable_grad(), saved_tensors_hooks(_same, _same):
                    output = ctx.run(tile)
                inputs = [tile] * needs_hidden + list(ctx.trained)
                found = list(
                    torch.autograd.grad(output, inputs, gradient.narrow(ctx.dim, start, length), allow_unused=True)
                )
                del output
                if hidden_gradient is not None:
                    own = found.pop(0)
                    target = hidden_gradient.narrow(ctx.dim, start, length)
                    target.zero_() if own is None else target.copy_(own)
                    del own
                for index, share in enumerate(found):
                    if share is not None:
                        sums[index] = _add(sums[index], share)
                del found
        after.restore()
        pairs = zip(sums, ctx.trained, strict=True)
        weights = [None if total is None else total.to(weight.dtype) for total, weight in pairs]
        return (hidden_gradient, None, None, None, *weights)


def _add(total: Tensor | None, share: Tensor) -> Tensor:
    if total is None:  # a copy, because the gradient may be a view
        return share.to(torch.promote_types(share.dtype, torch.float32), copy=True)
    return total.add_(share)


def _same(tensor: Tensor) -> Tensor:
    return tensor
