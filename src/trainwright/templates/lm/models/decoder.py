"""Decoder: a small transformer that predicts the next token. Nothing here knows how it is trained."""

import torch
import torch.nn.functional as F
from torch import nn


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
        batch, length, width = hidden.shape
        projected = self.queries_keys_values(self.attention_norm(hidden))
        heads = projected.view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.network(self.network_norm(hidden))


class Decoder(nn.Module):
    """Its arguments come from the `model` section of run.yaml."""

    def __init__(self, vocab_size, width, num_layers, num_heads, max_length):
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.tokens.weight.T  # [batch, length, vocab_size]
