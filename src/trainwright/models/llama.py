"""Llama: a decoder-only transformer with rotary positions, grouped-query attention and a SwiGLU MLP.

Parameters are named as in transformers' LlamaForCausalLM, so its weights load as they are.
Shapes in comments: batch B, sequence S, hidden width D, query heads H, key-value heads K, head width W.
Training lives in trainers/language_model.py; splitting over devices lives in parallel/.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.errors import ConfigError, DataError

# The label that the loss skips; torch's and transformers' convention.
IGNORED_LABEL = -100

# (cosines, sines) of the rotation angles, each [S, W / 2], or [B, 1, S, W / 2] where rows have positions of their own.
Rotations = tuple[Tensor, Tensor]


class Llama(nn.Module):
    """Predicts the next token at every position.

    `forward` returns `{"loss": ..., "logits": ...}`; the loss is `criterion` over all tokens with a label, or None
    without labels. `intermediate_size` defaults to 8/3 of the hidden size, rounded up to a multiple of 64: three
    matrices of that width hold as many weights as the two of a classic MLP that is four times as wide as the model.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int = 256,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        intermediate_size: int | None = None,
        max_positions: int = 2048,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = True,
        dropout: float = 0.0,
        initializer_range: float = 0.02,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": num_layers}
        sizes |= {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "max_positions": max_positions}
        _check_sizes(sizes, dropout=dropout)
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.tie_embeddings = tie_embeddings
        self.initializer_range = initializer_range
        self.model = Decoder(
            embed_tokens=nn.Embedding(vocab_size, hidden_size),
            layers=[
                DecoderLayer(
                    hidden_size=hidden_size,
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    intermediate_size=intermediate_size or default_intermediate_size(hidden_size),
                    norm_eps=norm_eps,
                    dropout=dropout,
                )
                for _ in range(num_layers)
            ],
            norm=nn.RMSNorm(hidden_size, eps=norm_eps),
            head_size=hidden_size // num_heads,
            rope_theta=rope_theta,
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.criterion = nn.CrossEntropyLoss(ignore_index=IGNORED_LABEL)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all weights anew and ties the head again, for a model that was made on the meta device."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.initializer_range)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        if self.tie_embeddings:
            # Moving off the meta device makes two parameters out of the shared one; this makes them one again.
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> dict[str, Tensor | None]:
        """Maps tokens [B, S] to logits [B, S, vocabulary] and, given labels, their mean loss.

        `labels` are the same tokens as `input_ids`, with -100 where there is nothing to learn; they are shifted here,
        so that position i is scored on token i + 1. `attention_mask` [B, S] is 0 at padding. With padding on the
        right it is not needed, since no token sees a later one; without it attention takes its fastest kernel.
        As [B, 1, S, S] it is bool and taken as it is: True where a query may see a key.

        Rows that hold several documents (data/pack.py) come with `position_ids` [B, S], each token's place in its
        own document, and `document_ids` [B, S], which are equal for tokens that may see each other (-1: padding).
        """
        if input_ids.shape[-1] > self.max_positions:
            raise DataError(
                f"The model has {self.max_positions} positions (max_positions) but the sequences hold "
                f"{input_ids.shape[-1]} tokens. Shorten the sequences or raise model.max_positions."
            )
        logits = self.lm_head(self.model(input_ids, attention_mask, position_ids, document_ids))
        if labels is None:
            return {"loss": None, "logits": logits}
        # The labels are shifted, not the logits: cutting a position off the logits would copy them all.
        next_tokens = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        # In float32, as the log of a sum over the vocabulary loses too much in 16 bits.
        loss = self.criterion(logits.flatten(0, 1).float(), next_tokens.flatten())
        return {"loss": loss, "logits": logits}

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.8,
        top_k: int | None = 50,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns `input_ids` [B, S] with `max_new_tokens` sampled tokens appended to each row.

        Each token is drawn from the `top_k` likeliest (all, if None); temperature 0 takes the likeliest. There is no
        key-value cache: a token costs a forward pass over all tokens before it (the last `max_positions` of them).
        """
        was_training = self.training
        self.eval()
        for _ in range(max_new_tokens):
            logits = self(input_ids[:, -self.max_positions :])["logits"][:, -1].float()
            chosen = _sample(logits, temperature=temperature, top_k=top_k, generator=generator)
            input_ids = torch.cat((input_ids, chosen), dim=1)
        self.train(was_training)
        return input_ids


class Decoder(nn.Module):
    """The stack of layers between the token ids [B, S] and the head: returns normalised states [B, S, D]."""

    def __init__(
        self,
        *,
        embed_tokens: nn.Embedding,
        layers: list[DecoderLayer],
        norm: nn.RMSNorm,
        head_size: int,
        rope_theta: float,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.head_size = head_size
        self.rope_theta = rope_theta

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Runs every layer with the same rotations and mask, which are made once."""
        hidden: Tensor = self.embed_tokens(input_ids)
        if position_ids is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.float32)
        else:
            positions = position_ids[:, None].float()  # the dim of size 1 stands for the heads
        rotations = rotary_angles(positions, head_size=self.head_size, theta=self.rope_theta)
        mask = visible_keys(attention_mask, document_ids)
        for layer in self.layers:
            hidden = layer(hidden, rotations, mask)
        normalised: Tensor = self.norm(hidden)
        return normalised


class DecoderLayer(nn.Module):
    """Attention, then the MLP; each reads a normalised copy of the residual stream [B, S, D] and adds to it."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        intermediate_size: int,
        norm_eps: float,
        dropout: float,
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.self_attn = Attention(hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.mlp = SwiGLU(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, rotations: Rotations, mask: Tensor | None) -> Tensor:
        """Returns the residual stream after this layer; dropout falls on what is added, never on the stream."""
        attended: Tensor = self.dropout(self.self_attn(self.input_layernorm(hidden), rotations, mask))
        hidden = hidden + attended
        transformed: Tensor = self.dropout(self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + transformed


class Attention(nn.Module):
    """Causal self-attention in which each of the K key-value heads serves H / K query heads."""

    def __init__(self, *, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        self.is_grouped = num_kv_heads != num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotations: Rotations, mask: Tensor | None) -> Tensor:
        """Mixes positions: [B, S, D] → [B, S, D]. Without a mask attention is causal over the whole sequence."""
        queries = rotate(self._split_heads(self.q_proj(hidden)), rotations)  # [B, H, S, W]
        keys = rotate(self._split_heads(self.k_proj(hidden)), rotations)  # [B, K, S, W]
        values = self._split_heads(self.v_proj(hidden))  # [B, K, S, W]
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _split_heads(self, projected: Tensor) -> Tensor:
        # The number of heads is read off the tensor: under tensor parallelism a rank holds only some of them.
        return projected.view(*projected.shape[:-1], -1, self.head_size).transpose(1, 2)


class SwiGLU(nn.Module):
    """The gated MLP: down(silu(gate(x)) × up(x)), position by position."""

    def __init__(self, *, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D]."""
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


def default_intermediate_size(hidden_size: int) -> int:
    """Returns 8/3 of the hidden size, rounded up to a multiple of 64 for the matrix units' sake."""
    return -(-8 * hidden_size // (3 * 64)) * 64


def rotary_angles(positions: Tensor, *, head_size: int, theta: float) -> Rotations:
    """Returns the cosines and sines by which each position (float32) rotates each pair of a head's features.

    They are worked out in every forward pass instead of kept in a buffer: a few tiny kernels, for which a model may
    be made on the meta device or cast to 16 bits without its positions being lost or blurred.
    """
    exponents = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32) / head_size
    angles = positions[..., None] / theta**exponents
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, rotations: Rotations) -> Tensor:
    """Rotates features i and i + W/2 of each head [B, heads, S, W] by their position's angle."""
    cosines, sines = rotations
    first, second = heads.chunk(2, dim=-1)
    rotated = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return rotated.type_as(heads)  # the angles are float32 and would promote 16-bit heads


def visible_keys(attention_mask: Tensor | None, document_ids: Tensor | None) -> Tensor | None:
    """Returns a mask [B, 1, S, S], True where a query may see a key, or None where causality alone decides."""
    visible = None
    if attention_mask is not None:
        visible = _checked_mask(attention_mask) if attention_mask.dim() == 4 else causal_mask(attention_mask)
    if document_ids is not None:
        # Padding (-1) is a document of its own: it sees itself, so no query is left without a key.
        same = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril()
        visible = same if visible is None else visible & same
    return visible


def causal_mask(attention_mask: Tensor) -> Tensor:
    """Returns a mask [B, 1, S, S], True where a query may see a key: not later, and not padding (0)."""
    length = attention_mask.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device)
    visible = ones.tril() & attention_mask.bool()[:, None, None, :]
    # Padding sees itself: a row without any visible key would be a softmax over nothing, which is nan.
    return visible | ones.triu().tril()


def _checked_mask(attention_mask: Tensor) -> Tensor:
    if attention_mask.dtype != torch.bool:
        raise DataError(
            f"attention_mask {tuple(attention_mask.shape)} is {attention_mask.dtype}. A mask of four dims says which "
            "key each query may see and must be bool (True: may see); one of two dims is 0 at padding."
        )
    return attention_mask


def _sample(logits: Tensor, *, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Draws one token per row of the logits [B, vocabulary]: returns [B, 1]."""
    if temperature <= 0:
        return logits.argmax(dim=-1, keepdim=True)
    candidates = logits.shape[-1] if top_k is None else min(top_k, logits.shape[-1])
    values, tokens = logits.topk(candidates, dim=-1)
    chosen = torch.multinomial((values / temperature).softmax(dim=-1), 1, generator=generator)
    return tokens.gather(-1, chosen)


def _check_sizes(sizes: dict[str, int], *, dropout: float) -> None:
    """Refuses sizes that cannot make a model, before any weight is made."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}. Use a whole number of at least 1.", where="model")
    hidden_size, num_heads, num_kv_heads = sizes["hidden_size"], sizes["num_heads"], sizes["num_kv_heads"]
    if hidden_size % (2 * num_heads):
        raise ConfigError(
            f"hidden_size {hidden_size} does not split into {num_heads} heads of an even width, which rotary "
            f"positions need. Use a multiple of {2 * num_heads}, or another num_heads.",
            where="model",
        )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}: each key-value head serves "
            "equally many query heads. Change one of the two.",
            where="model",
        )
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout is {dropout}. Use a probability from 0 up to, not including, 1.", where="model")
