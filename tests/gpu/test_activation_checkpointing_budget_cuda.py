"""`model.activation_checkpointing.budget: auto` on a GPU with limited memory: real steps find what fits."""

from __future__ import annotations

import pytest
import torch

from trainwright import RunConfig
from trainwright.autotune.activation_checkpointing import settle_activation_checkpointing
from trainwright.backends import pick_backend
from trainwright.build.run import assemble
from trainwright.parallel.collectives import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FILE = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        for _ in range(4):  # each product and each sine holds its input: 64 MiB a sample
            x = (x * self.weight).sin()
        return x


class Stack(nn.Module):
    def __init__(self, num_layers=8):
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(num_layers))

    def forward(self, x):
        x = x.expand(len(x), 2**24)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.full((1,), float(index))}
"""


def settle(tmp_path):
    (tmp_path / "parts.py").write_text(FILE)
    (tmp_path / "run.yaml").write_text(
        f"name: small\noutput_dir: {tmp_path}\n"
        "model: {type: parts.py:Stack, activation_checkpointing: {layers: [Wide], budget: auto}}\n"
        "data: {train: {type: parts.py:Rows}}\n"
        "trainer: {max_steps: 2, global_batch_size: 2, micro_batch_size: 2, optimizer: {type: adamw, lr: 1e-3}}\n"
        "runtime: {device: cuda, precision: fp32}\n"
    )
    config, backend = RunConfig.load(tmp_path / "run.yaml"), pick_backend("cuda")

    def alone(trial, folder):
        return assemble(trial, None, backend, Ranks(), folder, evaluates=False)[0]

    return settle_activation_checkpointing(config, alone, backend=backend, ranks=Ranks(), folder=None)


def test_a_gpu_with_room_recomputes_nothing_and_a_small_one_some(tmp_path):
    assert settle(tmp_path).model.reserved["activation_checkpointing"]["budget"] == 1.0
    before = torch.cuda.get_per_process_memory_fraction(0)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction(5 * 2**30 / total, 0)
        share = settle(tmp_path).model.reserved["activation_checkpointing"]["budget"]
    finally:
        torch.cuda.set_per_process_memory_fraction(before, 0)
    assert 0.0 < share < 1.0
