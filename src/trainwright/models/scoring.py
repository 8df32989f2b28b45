"""Log-likelihoods of continuations with a decoder; generation.py generates continuations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Score(NamedTuple):
    """The log-likelihood of a continuation."""

    log_likelihood: float
    """The sum over its tokens, in nats."""
    is_greedy: bool
    """True if each token is the most likely one."""


@torch.no_grad()
def score_continuations(model: nn.Module, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Score]:
    """Returns the score of each row, a context and its continuation, with one forward for all rows.

    Both have at least one token. Rows for which the model reads the same tokens, such as continuations of one token
    after the same context, are read once. The model must be in evaluation mode.
    """
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    numbers: dict[tuple[int, ...], int] = {}
    which = [numbers.setdefault((*context, *continuation[:-1]), len(numbers)) for context, continuation in rows]
    width = max(map(len, numbers))
    # Padding is on the right, where a causal model does not see it.
    ids = torch.tensor([[*read, *[0] * (width - len(read))] for read in numbers], device=device)
    # The last token that is read predicts the last one of the continuation, so these are aligned on the right.
    length = max(len(continuation) for _, continuation in rows)
    ends = torch.tensor([len(read) for read in numbers], device=device)
    positions = (ends[:, None] + torch.arange(-length, 0, device=device)).clamp(min=0)
    padding = [length - len(continuation) for _, continuation in rows]
    targets = torch.tensor([[*[0] * count, *row[1]] for row, count in zip(rows, padding, strict=True)], device=device)
    is_counted = torch.arange(length, device=device) >= torch.tensor(padding, device=device)[:, None]
    logits = _logits_at(model, ids, positions)[which].float()  # [rows, length, vocabulary]
    log_probabilities = logits.log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]
    totals = log_probabilities.masked_fill(~is_counted, 0.0).sum(dim=-1)
    are_greedy = ((logits.argmax(dim=-1) == targets) | ~is_counted).all(dim=-1)
    return [Score(*each) for each in zip(totals.tolist(), are_greedy.tolist(), strict=True)]


def _logits_at(model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    """Returns the logits at the positions [B, K] of the tokens [B, S]."""
    parameters = inspect.signature(model.forward).parameters
    if "logits_at" in parameters:
        only: Tensor = model(input_ids=ids, logits_at=positions)["logits"]
        return only
    options: dict[str, Any] = {}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = ids.shape[1] - int(positions.min())
    outputs = model(input_ids=ids, **options)
    logits: Any = outputs if isinstance(outputs, Tensor) else outputs["logits"]
    if hasattr(logits, "full_tensor"):  # a DTensor
        logits = logits.full_tensor()
    # All logits, those of the last tokens, or, with virtual tokens of peft, more than there are tokens.
    first = ids.shape[1] - logits.shape[1]
    found: Tensor = logits[torch.arange(len(ids), device=ids.device)[:, None], positions - first]
    return found
