"""How far an optimizer ends from torch's AdamW in fp32 when both get the gradients of one run.

    PYTHONPATH=src:.:.venv/integrations TORCHDYNAMO_DISABLE=1 python -m tests.optim.replayed_gradients

prints the errors of torchao's AdamW8bit, which test_eight_bit.py compares with. The gradients are those of a small
language model on the standard library's sources, and of a quadratic with curvatures from 1e-4 to 1.
"""

from __future__ import annotations

import textwrap
from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from trainwright.models.llama import Llama

NUM_STEPS = 50
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def language_model():
    torch.manual_seed(0)
    return Llama(vocab_size=128, hidden_size=64, num_layers=1, num_heads=4, max_positions=64, intermediate_size=192)


@cache
def data():
    return torch.tensor([min(ord(each), 127) for each in Path(textwrap.__file__).read_text(encoding="utf-8")])


def language_model_loss(model, step):
    starts = torch.randint(0, len(data()) - 33, (2,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([data()[start : start + 33] for start in starts.tolist()])
    return cross_entropy(model(input_ids=rows[:, :-1])["logits"].flatten(0, 1), rows[:, 1:].flatten())


class Quadratic(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(32, 512, generator=generator))
        self.register_buffer("curvature", 10.0 ** -torch.linspace(0, 4, 512))


def quadratic_loss(model, step):
    noise = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(step))
    return (model.curvature * (model.weight + 0.3 * noise).square()).sum()


PROBLEMS = {
    "language model": (language_model, language_model_loss),
    "quadratic": (Quadratic, quadratic_loss),
}


def replayed_error(problem, make):
    """Returns the distance of the final matrices from those of fp32 moments, relative to how far these moved."""
    build, loss_of = PROBLEMS[problem]
    model = build()
    matrices = [each for each in model.parameters() if each.ndim == 2]
    copies = [torch.nn.Parameter(each.detach().clone()) for each in matrices]
    start = [each.detach().clone() for each in matrices]
    exact = torch.optim.AdamW(model.parameters(), **SETTINGS)
    tested = make(copies)
    for step in range(NUM_STEPS):
        exact.zero_grad()
        loss_of(model, step).backward()
        for copy, matrix in zip(copies, matrices, strict=True):
            copy.grad = matrix.grad.clone()
        exact.step()
        tested.step()
    difference = sum((one - other).square().sum() for one, other in zip(matrices, copies, strict=True))
    moved = sum((one - other).square().sum() for one, other in zip(matrices, start, strict=True))
    return float((difference / moved).sqrt().detach())


def main():
    from torchao.optim import AdamW8bit

    for problem in PROBLEMS:
        print(problem, round(replayed_error(problem, lambda weights: AdamW8bit(weights, **SETTINGS)), 4))


if __name__ == "__main__":
    main()
