"""Decoder: a small transformer that predicts the next token. This file is independent of the training."""

import torch
import torch.nn.functional as F
from torch import nn


def rotate(heads):
    """Rotates each pair of numbers by an angle that grows with the position, so that attention depends on distances."""
    length, half = heads.shape[-2], heads.shape[-1] // 2
    speeds = 10_000 ** (-torch.arange(half, device=heads.device) / half)
    angles = torch.arange(length, device=heads.device)[:, None] * speeds  # [length, half]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], dim=-1
    )


class Block(nn.Module):
    """Attention over earlier tokens, then a small network for each token."""

    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden):  # [batch, length, width]
        projected = self.queries_keys_values(self.attention_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        attended = F.scaled_dot_product_attention(rotate(queries), rotate(keys), values, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).flatten(2))
        return hidden + self.network(self.network_norm(hidden))


class Decoder(nn.Module):
    """Its arguments come from the `model` section of run.yaml."""

    def __init__(self, vocab_size, width, num_layers, num_heads):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, input_ids):
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.tokens.weight.T  # [batch, length, vocab_size]
