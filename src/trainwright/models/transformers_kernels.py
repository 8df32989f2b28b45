"""Faster kernels for transformers models: attention without unnecessary masks, and a fused head and loss.

`use_fast_attention` registers an attention and a mask function with transformers under the name ATTENTION and makes a
model use them. `fuse_head` replaces the forward of a causal language model. Weights and configs do not change, and
results differ from those of the stock model only by rounding. `model.kernels: stock` disables both (from_config.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from trainwright.models.layers.attention import Mask, attention, is_full, next_tokens
from trainwright.models.layers.document_attention import (
    DocumentBorders,
    document_borders,
    has_blocks,
    padded_borders,
)
from trainwright.models.layers.kernel_table import fastest
from trainwright.models.layers.losses import fuses_loss, head_loss
from trainwright.models.layers.varlen_attention import DocumentStarts, band, document_starts

Kernels = Literal["fast", "stock"]
"""The values of `model.kernels`: the kernels of this file, or transformers' own."""
ATTENTION = "trainwright"
"""The name of the attention function in transformers' registries."""


class SlidingWindow(NamedTuple):
    """The mask of rows without padding or documents in which a query attends to the last `size` keys, including its
    own."""

    size: int


Visibility = Mask | SlidingWindow | None
"""The result of `make_mask` and argument of `attend`; None means causal attention, or in an encoder attention to all
keys."""


def use_fast_attention(model: Any) -> bool:
    """Makes a transformers model use the attention of this file; returns False if the model keeps its own.

    The model keeps its own if transformers would not choose `sdpa` for all parts of the model, or if a layer computes
    with its mask and therefore needs a tensor.
    """
    from transformers import PreTrainedModel

    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if any(part.config._attn_implementation != "sdpa" or not part._can_set_attn_implementation() for part in parts):
        return False
    layers = {type(module) for module in model.modules() if not isinstance(module, PreTrainedModel)}
    if any(_computes_with_mask(layer.forward) for layer in layers):
        return False
    _register()
    model.set_attn_implementation(ATTENTION)
    return True


@cache
def _computes_with_mask(forward: Callable[..., Any]) -> bool:
    """Returns True if the source of a layer's forward computes with `attention_mask`, or is not available."""
    try:
        parameters = inspect.signature(forward).parameters
        if "attention_mask" not in parameters:
            return False
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError, ValueError):
        return True
    return bool(_READ_MASK.search(source))


_READ_MASK = re.compile(r"\battention_mask\s*[\[.]|[-+*&|~]\s*attention_mask\b|torch\.\w+\(\s*attention_mask\b")


@cache
def _register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, make_mask)


def make_mask(
    *,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **arguments: Any,
) -> Visibility:
    """The mask function for transformers' registry: returns the smallest description of the mask for `attend`.

    Padding and documents are block boundaries if these are faster. All other masks are those of transformers for
    sdpa.
    """
    from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

    length = arguments["kv_length"]
    if attention_mask is not None and is_full(attention_mask) and attention_mask.shape[-1] == length:
        attention_mask = None
    if "allow_is_bidirectional_skip" in arguments:  # only encoders and attention to an encoder have this argument
        is_plain = mask_function is bidirectional_mask_function and attention_mask is None and local_size is None
        if is_plain and arguments["allow_is_bidirectional_skip"]:
            return None
    elif _has_own_keys(arguments) and not arguments.get("use_vmap"):  # set for a user's own mask function
        window = local_size if local_size is not None and local_size < length else None
        config = arguments.get("config")
        is_sliding = window is None or window == getattr(config, "sliding_window", None)  # otherwise chunks
        width = _head_width(config)
        if arguments.get("allow_is_causal_skip"):  # no other pattern than padding and windows
            if attention_mask is None and window is None:
                return None
            if attention_mask is None and window is not None and is_sliding:
                return SlidingWindow(window)
            if attention_mask is not None and window is None and has_blocks(attention_mask, "padded", width=width):
                return padded_borders(attention_mask)
        elif mask_function.__name__ == "and_mask" and attention_mask is None:
            documents = _documents(mask_function, arguments)
            if window is None and has_blocks(documents, width=width):
                return document_borders(documents)
            if is_sliding and fastest("packed" if window is None else "packed window", length, width) == "varlen":
                return document_starts(documents, window=window)
    mask: Tensor | None = sdpa_mask(
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **arguments
    )
    return mask


def _head_width(config: Any) -> int | None:
    """Returns the width of a head from the names that most configs use; None if the config has other names."""
    width = getattr(config, "head_dim", None)
    features, num_heads = (getattr(config, name, None) for name in ("hidden_size", "num_attention_heads"))
    return width or (features // num_heads if features and num_heads else None)


def _has_own_keys(arguments: dict[str, Any]) -> bool:
    """Returns True if queries and keys are of the same tokens, as in training, but not in generation."""
    # Up to 5.3 transformers passes `cache_position` instead, a tensor.
    offsets = (arguments.get("q_offset", 0), arguments.get("kv_offset", 0))
    is_start = all(type(offset) is int and offset == 0 for offset in offsets)
    return is_start and arguments.get("q_length", 1) == arguments["kv_length"] != 1


def _documents(mask_function: Callable[..., Tensor], arguments: dict[str, Any]) -> Tensor:
    """Returns the number of each token's document [B, S] from the mask function of packed rows.

    A document ends where a token does not attend to the previous one, which requires S values of the mask instead of
    S².
    """
    device = torch.device(arguments["device"])
    rows = torch.arange(arguments["batch_size"], device=device)[:, None]
    queries = torch.arange(arguments["q_length"], device=device)[None]
    continues = mask_function(rows, torch.zeros_like(rows), queries, (queries - 1).clamp(min=0))
    return (~continues).expand(len(rows), -1).cumsum(dim=1)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visibility,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers' registry: [B, heads, S, W] → [B, S, heads, W]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    # transformers' function handles these: it adds a position bias, fills a paged cache, and warns or raises otherwise.
    is_special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux", "cache"))
    is_special = is_special or bool(kwargs.get("output_attentions"))
    if is_special or (attention_mask is None and is_causal and query.shape[2] != key.shape[2]):
        mask = _dense(attention_mask, query)
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return result
    window = None
    if isinstance(attention_mask, SlidingWindow):
        window, attention_mask = attention_mask.size, None
    mixed = attention(
        query, key, value, mask=attention_mask, is_causal=is_causal, window=window, dropout=dropout, scale=scaling
    )
    return mixed.transpose(1, 2).contiguous(), None


def _dense(mask: Visibility, queries: Tensor) -> Tensor | None:
    """Returns a mask of all pairs for a function that accepts only tensors."""
    if isinstance(mask, SlidingWindow):
        return band(queries.shape[2], mask.size, device=queries.device)
    return mask.visible() if isinstance(mask, DocumentBorders | DocumentStarts) else mask


class FusedForward:
    """The forward of a causal language model that fuses head and loss in training, without the logits.

    Every call checks that the head is a plain linear layer and that the loss function is the model's own. Otherwise,
    and in evaluation, the stock forward runs. `fuses_loss` explains `wanted`.
    """

    def __init__(self, model: Any, *, wanted: bool | None = None) -> None:
        self.__signature__ = inspect.signature(model.forward)
        self._model = model
        self.wanted = wanted
        self._loss_function = model.loss_function
        self._criterion = nn.CrossEntropyLoss()  # the same loss; torch 2.11 cannot compile its construction
        self._output = _output_without_logits()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy of the model, without the class of the outputs, which cannot be pickled."""
        return {name: value for name, value in vars(self).items() if name != "_output"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copy."""
        vars(self).update(state, _output=_output_without_logits())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the outputs of the stock forward or, with a fused head and loss, outputs without logits."""
        model = self._model
        if args or not self._may_fuse(model, kwargs):
            return type(model).forward(model, *args, **kwargs)
        labels = kwargs.pop("labels")
        kwargs.pop("logits_to_keep", None)
        outputs = model.base_model(**kwargs)
        loss = head_loss(model.get_output_embeddings(), outputs[0], next_tokens(labels))
        kept = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        return self._output(loss=loss, **kept)

    def _may_fuse(self, model: Any, kwargs: Mapping[str, Any]) -> bool:
        if kwargs.get("labels") is None or any(kwargs.get(name) is not None for name in _OTHER_LOSSES):
            return False
        head = model.get_output_embeddings()
        is_usual = model.loss_function is self._loss_function and not kwargs.get("logits_to_keep")
        parameter = next(model.parameters())
        return is_usual and fuses_loss(self.wanted, head, self._criterion, parameter, training=model.training)


_OTHER_LOSSES = ("num_items_in_batch", "shift_labels", "return_dict")
"""Arguments that change the loss or the kind of output."""


@cache
def _output_without_logits() -> type[Any]:
    """Returns the class of a training step's outputs, whose attribute `logits` raises an error that names the setting.

    As a mapping it has the key with None, like the outputs of shipped models.
    """
    from transformers.utils import ModelOutput  # type: ignore[attr-defined]  # public, but not by __all__

    @dataclass
    class OutputWithoutLogits(ModelOutput):
        loss: Tensor | None = None
        past_key_values: Any = None
        hidden_states: Any = None
        attentions: Any = None

        @property
        def logits(self) -> NoReturn:
            raise AttributeError(NO_LOGITS)

        def __post_init__(self) -> None:
            super().__post_init__()  # type: ignore[no-untyped-call]  # transformers does not annotate it
            OrderedDict.__setitem__(self, "logits", None)  # that of ModelOutput would set the attribute

    return OutputWithoutLogits


NO_LOGITS = (
    "This training step has no logits, because the model fuses head and loss to save the memory of the logits. "
    "Set model.fused_loss: false to compute them; evaluation always does."
)


def has_plain_head(model: Any) -> bool:
    """Returns True if the forward only calls the body, the head and the mean loss over the next tokens.

    This is determined from its source code.
    """
    caps_logits = getattr(model.config, "final_logit_softcapping", None) is not None
    if model.base_model is model or caps_logits or not _is_plain_forward(type(model).forward):
        return False
    return getattr(model.loss_function, "__name__", "") == "ForCausalLMLoss"


def fuse_head(model: Any, *, wanted: bool | None = None) -> None:
    """Replaces the forward of a causal language model with a `FusedForward`. Requires `has_plain_head`."""
    model.forward = FusedForward(model, wanted=wanted)


_CAP = "self.config.final_logit_softcapping is not None"
_PLAIN_VALUES = {
    "hidden_states": r"\w+\.last_hidden_state|\w+\[0\]|slice_logits_to_keep\(hidden_states, logits_to_keep\)",
    "logits": r"self\.lm_head\(hidden_states(\[:, slice_indices, :\])?\)",
    "loss": r"None|self\.loss_function\((logits=)?logits, (labels=)?labels, .*vocab_size, \*\*kwargs\)",
}
"""Patterns of the values that a plain forward assigns to these names."""


@cache
def _is_plain_forward(forward: Callable[..., Any]) -> bool:
    """Returns True if the source passes the head's logits and the labels unchanged to the loss function."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))).body[0]
    except (OSError, TypeError, SyntaxError):  # no source, or not that of a function
        return False
    # A cap on the logits has no effect if its setting is None, which `has_plain_head` checks.
    capped = [each for each in ast.walk(function) if isinstance(each, ast.If) and ast.unparse(each.test) == _CAP]
    ignored = {inner for each in capped for inner in ast.walk(each)}
    assigned: dict[str, list[str]] = {name: [] for name in (*_PLAIN_VALUES, "labels")}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node not in ignored:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in {ast.unparse(target) for target in targets} & assigned.keys():
                is_whole = not isinstance(node, ast.AugAssign) and node.value is not None
                assigned[name].append(ast.unparse(node.value) if is_whole and node.value else "")
    is_plain = all(
        values and all(re.fullmatch(_PLAIN_VALUES[name], value) for value in values)
        for name, values in assigned.items()
        if name != "labels"
    )
    return is_plain and not assigned["labels"] and len(assigned["logits"]) == 1 and len(assigned["loss"]) == 2
