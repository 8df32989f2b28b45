"""Context parallelism: the ranks of a group share each sequence, every one holds the states of some positions.

A model speaks of its sequence through `self.sequence` (models/layers/whole_sequence.py); here is the object that takes
its place. Every rank gets the whole batch, cuts its part out of it, and returns the loss of the whole.

    6 chunks over 3 ranks:  0 1 2 2 1 0         under a causal mask all ranks then have equally much to do
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainwright.errors import ConfigError
from trainwright.labels import IGNORED_LABEL
from trainwright.parallel.context_collectives import join_chunks, sum_over
from trainwright.parallel.context_dropout import draw_apart, own_random_numbers
from trainwright.parallel.context_ring import ring_attention, ring_kernel
from trainwright.parallel.mesh import Mesh

VERBS = ("take", "positions", "expect", "bounds", "attend", "mean", "whole", "beside_loss")


class SplitSequence:
    """The verbs of a sequence of which this rank holds the chunks `rank` and 2 × `size` − 1 − `rank`.

    One object serves all modules of a model. It remembers the length of the sequence that was last cut: the same for
    all that a forward cuts, and needed again where parts are joined.
    """

    is_whole = False

    def __init__(self, *, rank: int, size: int, group: Any) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.length = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A copy of the model is on the same ranks; a process group cannot be copied.
        return self

    @property
    def chunks(self) -> tuple[int, int]:
        """The numbers of this rank's chunks."""
        return self.rank, 2 * self.size - 1 - self.rank

    def take(self, tensor: Tensor, dim: int = 1, fill: float = 0) -> Tensor:
        """Returns this rank's part of what has one entry per position in `dim`; `fill` stands for positions added."""
        self.length = tensor.shape[dim]
        return self._take(tensor, dim, fill)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Returns the places [S] in the whole sequence of `length` that this rank's tokens have.

        Those added at the end stand at the last one: a model need not have embeddings for more.
        """
        return self.take(torch.arange(length, device=device), dim=0, fill=length - 1)

    def expect(self, length: int) -> None:
        """Says how long the sequence is whose parts come next, where a stage of a pipeline cuts none itself."""
        self.length = length

    def bounds(self, length: int, device: torch.device) -> Tensor | None:
        """Returns a mask [1, 1, 1, all keys] for where every query sees every key; None where none is needed."""
        self.length = length
        return torch.ones(1, 1, 1, length, dtype=torch.bool, device=device) if length % (2 * self.size) else None

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Mixes the values of all positions for this rank's queries: each [B, heads, S, W], of this rank's positions.

        `mask` broadcasts to [B, heads, all queries, all keys]: bool (True: may see), or numbers added to the scores.
        Without one, and without causality, every position is seen: see `bounds`.
        """
        if keys.shape[2] != queries.shape[2]:
            raise ConfigError(
                f"{queries.shape[2]} queries met {keys.shape[2]} keys on a rank, as with a cache of keys and values. "
                "A sequence that is split over ranks (runtime.mesh.context) has no such cache: call the model without."
            )
        if is_causal and mask is None and not dropout and (kernel := ring_kernel(queries, keys)):
            return ring_attention(queries, keys, values, group=self.group, kernel=kernel, scale=scale)
        keys, values = self.gather(keys, values)
        settings = {"dropout_p": dropout, "scale": scale, "enable_gqa": enable_gqa}
        if not dropout or torch.compiler.is_compiling():
            return self._attend_to_all(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)
        with own_random_numbers(queries.device, self.rank):
            return self._attend_to_all(queries, keys, values, mask=mask, is_causal=is_causal, settings=settings)

    def gather(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of all positions, those added at the end included, by one message."""
        all_keys, all_values = join_chunks(torch.stack((keys, values)), 3, self.group).unbind()
        return all_keys, all_values

    def mean(self, loss: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss over the whole sequence, from that over this rank's `targets` (ignored ones apart)."""
        loss = _undivided(loss)
        count = (_undivided(targets) != IGNORED_LABEL).sum()
        # Where all are ignored the loss is nan, and counts for nothing.
        total = torch.where(count > 0, loss, 0.0) * count
        summed, counted = sum_over(torch.stack((total, count.to(total.dtype))), self.group).unbind()
        return summed / counted

    def whole(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Returns the parts of all ranks along `dim`, in the order of positions, without any that were added."""
        dim = dim % tensor.dim()
        return join_chunks(_undivided(tensor), dim, self.group).narrow(dim, 0, self.length)

    def beside_loss(self, logits: Tensor) -> Tensor | None:
        """Returns the logits of the whole sequence, or None in a training step: nobody should wait for so many."""
        return None if torch.is_grad_enabled() else self.whole(logits)

    def _take(self, tensor: Tensor, dim: int, fill: float) -> Tensor:
        length, chunk = tensor.shape[dim], -(-tensor.shape[dim] // (2 * self.size))
        parts = []
        for number in self.chunks:
            start = min(number * chunk, length)
            part = tensor.narrow(dim, start, min(chunk, length - start))
            if part.shape[dim] < chunk:
                shape = list(tensor.shape)
                shape[dim] = chunk - part.shape[dim]
                part = torch.cat((part, tensor.new_full(shape, fill)), dim)
            parts.append(part)
        return torch.cat(parts, dim)

    def _attend_to_all(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        is_causal: bool,
        settings: dict[str, Any],
    ) -> Tensor:
        """Mixes for this rank's queries, given the keys and values of all positions, added ones at the end."""
        if mask is None and not is_causal:
            return F.scaled_dot_product_attention(queries, keys, values, **settings)
        if mask is not None:
            rows = self._rows(mask, is_causal=is_causal)
            keys, values = (each[:, :, : mask.shape[-1]] for each in (keys, values))
            return F.scaled_dot_product_attention(queries, keys, values, attn_mask=rows, **settings)
        # Each chunk of queries meets the keys up to its end alone, which halves the work.
        length = queries.shape[2] // 2
        mixed = []
        for number, chunk in zip(self.chunks, queries.chunk(2, dim=2), strict=True):
            end = (number + 1) * length
            visible = torch.ones(length, end, dtype=torch.bool, device=queries.device).tril(end - length)
            keys_before, values_before = (each[:, :, :end] for each in (keys, values))
            mixed.append(
                F.scaled_dot_product_attention(chunk, keys_before, values_before, attn_mask=visible, **settings)
            )
        return torch.cat(mixed, dim=2)

    def _rows(self, mask: Tensor, *, is_causal: bool) -> Tensor:
        """Returns this rank's rows of a mask over all positions; positions added see whatever they like."""
        if is_causal:
            causal = torch.ones(mask.shape[-1], mask.shape[-1], dtype=torch.bool, device=mask.device).tril()
            mask = mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, float("-inf"))
        if mask.shape[-2] == 1:
            return mask
        return self._take(mask, mask.dim() - 2, fill=1 if mask.dtype == torch.bool else 0)


def split_sequences(model: nn.Module, mesh: Mesh, *, where: object | None = None) -> None:
    """Splits the model's sequences over the ranks along context, in place; nothing where there is one rank.

    `where` is the place of the setting, for what is refused: a model that does not speak of its sequence, or a loss
    that cannot be taken in parts.
    """
    size = mesh.size("context")
    if size == 1:
        return
    modules = [module for module in model.modules() if _has_sequence(module)]
    if not modules:
        raise ConfigError(
            f"runtime.mesh.context: {size} ranks are to share each sequence, but {type(model).__name__} cannot split "
            "its own: neither it nor a module in it has a `sequence` (models/layers/whole_sequence.py). Llama, "
            "GPT2, Bert and models made like them have one. Use context: 1, and data or tensor for the ranks.",
            where=where,
        )
    for module in modules:
        _check_criterion(module, size, where)
    sequence = SplitSequence(rank=mesh.rank("context"), size=size, group=mesh.group("context"))
    for module in modules:
        module.sequence = sequence  # type: ignore[assignment]  # no module, but nn.Module's types know only those
    draw_apart(model, rank=sequence.rank)


def _has_sequence(module: nn.Module) -> bool:
    sequence = getattr(module, "sequence", None)
    return all(callable(getattr(sequence, verb, None)) for verb in VERBS)


def _check_criterion(module: nn.Module, size: int, where: object | None) -> None:
    """Refuses a loss whose mean over the whole cannot be told from the means of the parts."""
    criterion = getattr(module, "criterion", None)
    if criterion is None:
        return
    is_mean = getattr(criterion, "reduction", None) == "mean" and getattr(criterion, "weight", None) is None
    if not is_mean or getattr(criterion, "ignore_index", IGNORED_LABEL) != IGNORED_LABEL:
        raise ConfigError(
            f"runtime.mesh.context: {size} ranks each take the loss over some positions, from which that over all "
            f"follows for a plain mean over targets only; the criterion of {type(module).__name__} is {criterion}. "
            f"Use one with reduction mean, ignore_index {IGNORED_LABEL} and no weight, or context: 1.",
            where=where,
        )


def _undivided(tensor: Tensor) -> Tensor:
    """Returns a tensor that is split along another axis in whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
