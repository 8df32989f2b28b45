"""Small models with dropout, and what one update of them gives: whoever rewrites a model compares bits with it."""

import torch
from torch import nn

from trainwright.models.bert import Bert
from trainwright.models.gpt2 import GPT2
from trainwright.models.layers.annotations import name_tensor
from trainwright.models.llama import Llama
from trainwright.models.t5 import T5
from trainwright.models.vit import ViT

IDS = torch.arange(24).reshape(3, 8) % 23
TEXT = {"input_ids": IDS, "labels": IDS}


def llama():
    sizes = {"hidden_size": 16, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}
    return Llama(vocab_size=23, max_positions=16, dropout=0.2, **sizes)


def gpt2():
    return GPT2(vocab_size=23, hidden_size=16, num_layers=3, num_heads=2, max_positions=16, dropout=0.2)


def bert():
    return Bert(vocab_size=23, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_positions=16)


def vit():
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    return ViT(image_size=8, patch_size=4, num_channels=1, num_labels=3, dropout=0.2, **sizes)


def t5():
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "head_size": 8, "intermediate_size": 24}
    return T5(vocab_size=23, **sizes)


def images():
    return {"pixel_values": torch.linspace(-1, 1, 192).reshape(3, 1, 8, 8), "labels": torch.tensor([0, 1, 2])}


SHIPPED = {
    "llama": (llama, TEXT, "DecoderLayer", "model.layers", "decoder_input"),
    "gpt2": (gpt2, TEXT, "Block", "transformer.h", "decoder_input"),
    "bert": (bert, TEXT, "Layer", "bert.encoder.layer", "encoder_input"),
    "vit": (vit, images(), "Layer", "vit.layers", "encoder_input"),
    "t5": (t5, TEXT, "Block", None, "decoder_input"),
}
"""By name: how it is made, a batch, its block's class, its stack of equal blocks, the name of a block's input."""


class Layer(nn.Module):
    def __init__(self, width=8, chance=0.3):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(chance)

    def forward(self, hidden, scale=None):
        added = self.dropout(self.down(torch.nn.functional.silu(self.up(hidden))))
        return hidden + (added if scale is None else added * scale)


class Stack(nn.Module):
    """A user's own model: a list of layers whose inputs it names."""

    def __init__(self, num_layers=4, chance=0.3):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(chance=chance) for _ in range(num_layers))

    def forward(self, x):
        hidden = self.first(x)
        for layer in self.layers:
            hidden = layer(name_tensor(hidden, "layer_input"), scale=hidden[:, :1])
        return {"loss": hidden.square().mean()}


POINTS = {"x": torch.linspace(-1, 1, 40).reshape(5, 8)}


def make(build, seed=0):
    torch.manual_seed(seed)
    return build()


def update_of(model, batch, seed=1):
    """The loss and all gradients of one update, with the random numbers of a seed."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch)["loss"]
    loss.backward()
    return {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def saved_bytes(model, batch):
    """The bytes that a forward pass leaves for the backward pass, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    held = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model(**batch)
    assert kept["loss"].requires_grad
    return sum(size for size, _ in held.values())
