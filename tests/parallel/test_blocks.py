"""Which modules of a user's model are gathered together."""

import torch
from torch import nn

from trainwright.parallel.fully_shard import SMALLEST_LAYER, find_blocks


def make_block():
    return nn.TransformerEncoderLayer(8, 2, 8)


class Net(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Stack(Net):
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_members_of_lists_are_blocks_and_what_is_in_them_is_not():
    blocks = [Stack(parts=nn.ModuleList([make_block()])), make_block()]
    assert find_blocks(Net(embed=nn.Embedding(4, 8), layers=nn.ModuleList(blocks))) == blocks


def test_lists_deep_in_a_model_and_several_of_them_are_found():
    blocks = [make_block() for _ in range(3)]
    decoder = nn.Sequential(nn.ReLU(), nn.Sequential(*blocks[1:]))
    assert find_blocks(Net(encoder=Net(layers=nn.ModuleList(blocks[:1])), decoder=decoder)) == blocks


def test_a_module_that_is_in_a_list_twice_is_one_block():
    block = make_block()
    assert find_blocks(Net(layers=nn.ModuleList([block, block, block]))) == [block]


def test_a_list_in_a_list_is_not_a_block_because_it_is_never_called():
    first, second = make_block(), make_block()
    assert find_blocks(nn.ModuleList([nn.ModuleList([first]), nn.ModuleDict({"one": nn.ModuleList([second])})])) == [
        first,
        second,
    ]


def test_small_layers_are_not_blocks_and_large_ones_are():
    with torch.device("meta"):
        small, large = nn.Linear(8, 8), nn.Linear(SMALLEST_LAYER, 1)
        assert find_blocks(nn.Sequential(small, nn.ReLU(), large)) == [large]
        assert find_blocks(Net(heads=nn.ModuleList([small, nn.Linear(8, 8)]))) == []


def test_a_model_without_lists_has_no_blocks():
    assert find_blocks(Net(embed=nn.Embedding(4, 8), body=make_block())) == []
