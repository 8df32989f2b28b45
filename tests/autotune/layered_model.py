"""A stack of layers in a device that has room for what so many of them hold."""

import torch
from torch import nn

from trainwright.memory.activation_checkpointing import Recomputed
from trainwright.memory.module_paths import has_around


class Layer(nn.Module):
    """Holds, of every sample, twice its width of numbers and a mask."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden):
        return hidden + self.dropout(self.down(torch.tanh(self.up(hidden))))


class Layered(nn.Module):
    """Meets the end of memory in a forward where more than `limit` of its layers are not recomputed."""

    def __init__(self, limit=6, num_layers=6):
        super().__init__()
        self.limit = limit
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(4, 2)

    def forward(self, x, labels):
        num_kept = sum(not has_around(layer, Recomputed) for layer in self.layers)
        if torch.is_grad_enabled() and num_kept > self.limit:
            raise torch.OutOfMemoryError(f"Tried to hold {num_kept} layers.")
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


class AdamWithTensorRate(torch.optim.Adam):
    """Adam whose rate is a tensor, which a schedule writes in place."""

    def __init__(self, params, lr):
        super().__init__(params, lr=torch.tensor(lr))
