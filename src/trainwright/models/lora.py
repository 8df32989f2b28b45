"""LoRA: linear layers keep their weight and train a product of two low-rank matrices; adapters in PEFT's file
format."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainwright.errors import CheckpointError, ConfigError
from trainwright.models.names import as_globs, matched_parameters, names_module, unmatched
from trainwright.models.saving import as_stored, has_files_of_others, is_model_folder, staged, write_json, write_tensors


class LoRALinear(nn.Linear):
    """A linear layer with frozen `weight` and `bias` and a trained product `lora_b @ lora_a`.

    `add_lora` converts an nn.Linear to one. The adapter of a 16-bit layer is float32, because 16 bits lose small
    updates.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    lora_rank: int
    lora_alpha: float
    lora_dropout: float

    def forward(self, input: Tensor) -> Tensor:
        """Maps [..., in] to [..., out]."""
        return add_adapters(self.drop(input), [self], [self.base(input)])[0]

    def base(self, input: Tensor) -> Tensor:
        """Returns the output without the adapter."""
        return F.linear(input, self.weight, self.bias)

    def restore_weight(self) -> None:
        """Makes `weight` a parameter; a subclass may store it in another form (layers/quantized_linear.py)."""

    def drop(self, input: Tensor) -> Tensor:
        """Returns the adapter's input, with dropout while training."""
        return F.dropout(input, self.lora_dropout, self.training)

    def reset_parameters(self) -> None:
        """Initializes the weights and the adapter."""
        super().reset_parameters()
        self.reset_adapter()

    @torch.no_grad()
    def reset_adapter(self) -> None:
        """Initializes A like a linear layer and B with 0, so the layer's output is the same as without an adapter."""
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b)

    def extra_repr(self) -> str:
        """Adds the adapter's settings to the representation."""
        return f"{super().extra_repr()}, rank={self.lora_rank}, alpha={self.lora_alpha}, dropout={self.lora_dropout}"


def add_adapters(input: Tensor, layers: Sequence[LoRALinear], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs of layers with the same input, each with its adapter's product added.

    The first matrices of all adapters are one product, so that the input is read once and its gradient written once.
    """
    first = layers[0].lora_a if len(layers) == 1 else torch.cat([layer.lora_a for layer in layers])
    # Autocast casts both to its dtype, so a float32 copy of the input would only take memory.
    states = input if torch.is_autocast_enabled(input.device.type) else input.to(first.dtype)
    inner = F.linear(states, first).split_with_sizes([layer.lora_rank for layer in layers], dim=-1)
    added = (
        F.linear(part, layer.lora_b) * (layer.lora_alpha / layer.lora_rank)
        for part, layer in zip(inner, layers, strict=True)
    )
    return [output + each.to(output.dtype) for output, each in zip(outputs, added, strict=True)]


def add_lora(
    model: nn.Module,
    *,
    match: str | Sequence[str],
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    train: str | Sequence[str] = (),
) -> list[str]:
    """Adds an adapter to every linear layer that a glob of `match` matches, and freezes everything else.

    Parameters that a glob of `train` matches, such as a new head's (`classifier.*`), are trained too. Returns the names
    of the layers, in the model's order. A glob that matches no linear layer is rejected, as are layers whose weight
    is used without their forward, where an adapter would have no effect.
    """
    globs = as_globs("lora.match", match)
    if not globs:
        raise ConfigError("lora.match: matches no layer. Use a glob such as *.q_proj.")
    # Includes layers that `_adapt` rejects, because silently omitted layers would seem trained.
    linear = [name for name, one in model.named_modules() if name and (isinstance(one, nn.Linear) or is_conv1d(one))]
    for glob in globs:
        if not any(names_module(glob, name) for name in linear):
            raise ConfigError(f"lora.match: {unmatched(glob, linear, 'linear layer')}")
    layers = [name for name in linear if any(names_module(glob, name) for glob in globs)]
    trained = matched_parameters("lora.train", train, model)
    _check_settings(rank=rank, alpha=alpha, dropout=dropout)
    _adapt(model, layers, rank=rank, alpha=alpha, dropout=dropout, train=trained)
    return layers


def _adapt(
    model: nn.Module, layers: Sequence[str], *, rank: int, alpha: float, dropout: float, train: Sequence[str]
) -> None:
    """Adds adapters to the layers of these names; freezes all parameters except `train`."""
    modules = dict(model.named_modules())
    if any(isinstance(module, LoRALinear) for module in modules.values()):
        raise ConfigError("lora: the model already has adapters. Use one list of globs, or call merge_lora first.")
    for name in layers:
        reason = _why_not(name, modules)
        if reason:
            raise ConfigError(f"lora.match: matches {name}, {reason}")
    own = dict(model.named_parameters(remove_duplicate=False))
    for parameter in own.values():
        parameter.requires_grad_(False)
    for name in train:
        own[name].requires_grad_(True)
    for name in layers:
        layer: Any = modules[name]
        # Changes the object's class instead of replacing the object, so hooks are kept and a shared layer stays shared.
        layer.__class__ = LoRALinear
        dtype = torch.promote_types(layer.weight.dtype, torch.float32)
        options = {"device": layer.weight.device, "dtype": dtype}
        layer.lora_a = nn.Parameter(torch.empty(rank, layer.in_features, **options))
        layer.lora_b = nn.Parameter(torch.empty(layer.out_features, rank, **options))
        layer.lora_rank, layer.lora_alpha, layer.lora_dropout = rank, float(alpha), float(dropout)
        layer.reset_adapter()


@torch.no_grad()
def merge_lora(model: nn.Module) -> list[str]:
    """Adds each adapter's product to its layer's weight and converts the layer to a plain nn.Linear, in place.

    Returns the layers' names. The sum is rounded once, to the weight's dtype. Frozen parameters stay frozen. For a
    quantized layer, the product is added to the dequantized weight, not to the original one.
    """
    layers = dict(lora_layers(model))
    for layer in layers.values():
        layer.restore_weight()
        product = layer.lora_b @ layer.lora_a * (layer.lora_alpha / layer.lora_rank)
        layer.weight.copy_(layer.weight.to(product.dtype) + product)
        for name in ("lora_a", "lora_b", "lora_rank", "lora_alpha", "lora_dropout"):
            delattr(layer, name)
        layer.__class__ = nn.Linear  # type: ignore[assignment]  # what it was before add_lora
    return list(layers)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yields the name and the layer of each adapter."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def keeps_base(model: nn.Module) -> bool:
    """Returns True if the adapters of a new model add nothing yet, and no other parameter is trainable."""
    adapters = _adapter_names(model)
    is_alone = all(name in adapters for name, one in model.named_parameters() if one.requires_grad)
    # Weights on the meta device, or of an estimate, are assumed to be unchanged since `add_lora`.
    products = (layer.lora_b.data for _, layer in lora_layers(model))
    return is_alone and not any(type(one) is Tensor and not one.is_meta and one.any() for one in products)


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Within the context the adapters add nothing: the outputs are those of the base weights."""
    layers = [layer for _, layer in lora_layers(model)]
    alphas = [layer.lora_alpha for layer in layers]
    for layer in layers:
        layer.lora_alpha = 0.0  # for every form of the forward: fused, in fp8, sharded
    try:
        yield
    finally:
        for layer, alpha in zip(layers, alphas, strict=True):
            layer.lora_alpha = alpha


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights that training with adapters changes: their matrices, and every other trainable parameter."""
    adapters = _adapter_names(model)
    own = dict(model.named_parameters())
    return {name: one.detach() for name, one in own.items() if name in adapters or one.requires_grad}


def _adapter_names(model: nn.Module) -> set[str]:
    return {f"{name}.lora_{letter}" for name, _ in lora_layers(model) for letter in "ab"}


@torch.no_grad()
def load_lora_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Loads what `lora_state` returned into a model with adapters in the same layers."""
    own = dict(model.named_parameters(remove_duplicate=False))
    _reject_misfit(state, {name: tuple(one.shape) for name, one in own.items()}, needed=_adapter_names(model))
    for name, value in state.items():
        own[name].copy_(value)


def _reject_misfit(
    state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, needed: Collection[str]
) -> None:
    """Rejects a state with missing or unknown adapters, or other shapes."""
    problems = [f"{name}: not in the model" for name in state if name not in shapes]
    problems += [f"{name}: not in the adapters given" for name in sorted(set(needed) - state.keys())]
    problems += [
        f"{name}: {tuple(value.shape)} given, {shapes[name]} in the model"
        for name, value in state.items()
        if name in shapes and tuple(value.shape) != shapes[name]
    ]
    if problems:
        more = "; …" if len(problems) > 8 else ""
        raise ConfigError(
            f"lora: these adapters do not fit the model: {'; '.join(problems[:8])}{more}. "
            "Call add_lora with the rank and match that they were trained with."
        )


def _why_not(name: str, modules: dict[str, nn.Module]) -> str:
    """Returns the reason why this module cannot have an adapter; an empty string if it can."""
    module, parent = modules[name], modules[name.rpartition(".")[0]]
    if is_conv1d(module):
        return (
            "a Conv1D of transformers, which stores its weight transposed and is not supported. Use the model type "
            "gpt2, which has the same weights in linear layers."
        )
    if isinstance(parent, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
        return (
            f"whose weight torch's {type(parent).__name__} uses without calling the layer, so that an adapter has no "
            "effect. Exclude it, or replace the module with one that calls its layers."
        )
    if type(module) is not nn.Linear:
        kind = type(module).__name__
        return f"a {kind}, whose forward an adapter would replace. Only plain nn.Linear layers are supported."
    sharers = [
        other
        for other, one in modules.items()
        if one is not module and any(each is module.weight for each in one.parameters(recurse=False))
    ]
    if sharers:
        return (
            f"whose weight is tied to that of {', '.join(sharers)}: merging the adapter would change both. Untie them, "
            "or exclude this layer."
        )
    return ""


def is_conv1d(module: nn.Module) -> bool:
    """Returns True for the linear layer of transformers' GPT-2, which stores its weight transposed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _check_settings(*, rank: Any, alpha: Any, dropout: Any) -> None:
    numbers = [
        isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        for value in (rank, alpha, dropout)
    ]
    if not numbers[0] or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"lora.rank: must be a whole number of at least 1, got {rank!r}.")
    if not numbers[1] or alpha <= 0:
        raise ConfigError(f"lora.alpha: must be a number above 0, got {alpha!r}.")
    if not numbers[2] or not 0 <= dropout < 1:
        raise ConfigError(f"lora.dropout: must be a number from 0 to below 1, got {dropout!r}.")


CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

# PEFT wraps the model twice and has these names for the two matrices.
PREFIX = "base_model.model."
THEIR_ENDS: Mapping[str, str] = {".lora_a": ".lora_A.weight", ".lora_b": ".lora_B.weight"}

# Keys of adapter_config.json that do not change the outputs, or are read. All others must be empty (null, false, [],
# {}), because an unknown kind of adapter would load but compute a different output.
KNOWN_KEYS = (
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "modules_to_save",
    "layers_to_transform", "layers_pattern", "megatron_core", "qalora_group_size", "eva_config",
)  # fmt: skip
# Of these, some values change nothing. Other initializations (pissa, olora, loftq …) change the base weights.
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}


def save_lora(model: nn.Module, folder: str | Path, *, base: str | None = None) -> Path:
    """Writes the adapters, and every other trainable parameter, to a folder; returns it.

    `base` is the name or folder of the base weights, for information. Other files in the folder are kept; a folder with
    files but neither adapters nor a model is rejected.

    >>> from trainwright.models.llama import Llama
    >>> from trainwright.models.lora import add_lora, merge_lora
    >>> from trainwright.models.lora import load_lora, save_lora
    >>> pretrained = Llama.from_preset("tiny").save_pretrained("pretrained")
    >>> model = Llama.from_pretrained(pretrained)
    >>> layers = add_lora(model, match="*.q_proj", rank=2)
    >>> folder = save_lora(model, "adapters")  # after its training
    >>> model = Llama.from_pretrained(pretrained)
    >>> load_lora(model, folder) == layers
    True
    >>> merge_lora(model) == layers  # plain layers again, to be saved or exported
    True
    """
    layers = dict(lora_layers(model))
    if not layers:
        raise ConfigError("lora: the model has no adapters to save. Call add_lora first.")
    state = lora_state(model)
    beside = [name for name in state if not name.endswith((".lora_a", ".lora_b"))]
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": first.lora_rank,
        "lora_alpha": first.lora_alpha,
        "lora_dropout": first.lora_dropout,
        "target_modules": list(layers),
        "modules_to_save": list(dict.fromkeys(name.rpartition(".")[0] for name in beside)) or None,
        "bias": "none",
        "task_type": None,
        "inference_mode": True,
    }
    folder = Path(folder)
    is_ours = (folder / CONFIG_FILE).is_file() or is_model_folder(folder)
    if not is_ours and has_files_of_others(folder):
        raise CheckpointError(
            f"{folder} has files but neither adapters nor a model, so nothing is written there. Use another folder, or "
            "empty it."
        )
    tensors = {_their_name(name): as_stored(value).clone() for name, value in state.items()}
    with staged(folder) as staging:
        write_tensors(tensors, staging / WEIGHTS_FILE)
        write_json(staging / CONFIG_FILE, config)
    return folder


def load_lora(model: nn.Module, folder: str | Path) -> list[str]:
    """Adds the adapters of a folder to a model without adapters, and loads them; returns the layers' names.

    Also reads PEFT's files. Unsupported kinds of adapters are rejected by name; the model is then unchanged.
    """
    folder = Path(folder)
    config, state = _read(folder)
    for key, value in config.items():
        is_plain = value in PLAIN_VALUES[key] if key in PLAIN_VALUES else key in KNOWN_KEYS or not value
        if not is_plain:
            raise ConfigError(
                f"{key} is {value!r}, which is not supported. Merge these adapters with PEFT and load the result.",
                where=folder / CONFIG_FILE,
            )
    layers = [name.removesuffix(".lora_a") for name in state if name.endswith(".lora_a")]
    known = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    strange = [name for name in layers if name not in known]
    if strange or not layers:
        found = f"adapters for {', '.join(strange[:5])}, not linear layers of this model" if strange else "no adapters"
        raise ConfigError(f"The folder has {found}. Does it belong to another model?", where=folder)
    rank, alpha, dropout = config.get("r", 8), config.get("lora_alpha", 8), config.get("lora_dropout", 0.0)
    _check_settings(rank=rank, alpha=alpha, dropout=dropout)
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}
    adapters = {f"{name}.lora_a": (rank, known[name].in_features) for name in layers}
    adapters |= {f"{name}.lora_b": (known[name].out_features, rank) for name in layers}
    _reject_misfit(state, {**shapes, **adapters}, needed=adapters)
    if config.get("use_rslora"):
        alpha *= math.sqrt(rank)  # that divides by the root of the rank
    train = [name for name in state if name not in adapters]
    _adapt(model, layers, rank=rank, alpha=alpha, dropout=dropout, train=train)
    load_lora_state(model, state)
    return layers


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"There is no {name}. Use a folder that save_lora or PEFT wrote.", where=folder)
    try:
        config = json.loads((folder / CONFIG_FILE).read_text("utf-8"))
        if not isinstance(config, dict) or config.get("peft_type") != "LORA":
            raise ValueError("its peft_type is not LORA")
    except ValueError as error:
        raise CheckpointError(f"This is not a LoRA adapter: {error}.", where=folder / CONFIG_FILE) from error
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise CheckpointError(f"The file is damaged: {error}. Copy it again.", where=folder / WEIGHTS_FILE) from error
    return config, {_our_name(name): value for name, value in tensors.items()}


def _their_name(name: str) -> str:
    for ours, theirs in THEIR_ENDS.items():
        if name.endswith(ours):
            return PREFIX + name.removesuffix(ours) + theirs
    return PREFIX + name


def _our_name(name: str) -> str:
    name = name.removeprefix(PREFIX)
    for ours, theirs in THEIR_ENDS.items():
        if name.endswith(theirs):
            return name.removesuffix(theirs) + ours
    return name
