"""Counts the floating-point operations of a step, by torch's own counter: matrix products, convolutions, attention.

One step is counted on tensors without values, beside the run, which it leaves as it was: compiled or recorded code
would show nothing to a counter. Where that cannot be, a step of the run is counted while it runs, or estimated. What
is recomputed counts too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from trainwright.backends.private_torch import FakeTensorMode, tree_map_only
from trainwright.checkpoint.contents import generator_state, restore_generators
from trainwright.events import EventStorage, Mean
from trainwright.loop.task import overrides
from trainwright.loop.trainer import Trainer

logger = logging.getLogger(__name__)

Shape = Sequence[int]


@dataclass(frozen=True)
class TensorLike:
    """What a tensor was like; it holds no memory."""

    shape: torch.Size
    dtype: torch.dtype


def flop_counter() -> FlopCounterMode:
    """Returns torch's counter; attention by a rule of our own, for torch's knows no CPU and no shared keys."""
    aten = torch.ops.aten
    forward = (
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
    )
    backward = (
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    )
    rules = {**dict.fromkeys(forward, _attention_flops), **dict.fromkeys(backward, _attention_backward_flops)}
    return FlopCounterMode(display=False, custom_mapping=rules)


def can_count_aside(trainer: Trainer) -> bool:
    """Can a step be counted beside the run? Not where ranks share a model, nor a step that a user has written."""
    return not trainer.ranks.mesh.is_split and not overrides(trainer, "train_step", Trainer)


def can_count_within(trainer: Trainer) -> bool:
    """Can a step be counted while it runs? Only where nothing of it is compiled: that would then run otherwise."""
    model = trainer.config.model
    return trainer.config.runtime.mode == "eager" and (model is None or "scan" not in model.reserved)


def estimate_flops(trainer: Trainer, tokens_per_step: float | None) -> int | None:
    """Returns six operations for each parameter and token, on this rank; None where nobody knows either number."""
    if tokens_per_step is None or trainer.surroundings.updater.pipeline is not None:
        return None
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return round(6 * num_parameters * tokens_per_step / trainer.ranks.size)


def count_aside(trainer: Trainer, batch: Any) -> int | None:
    """Returns the operations of a step on a batch like this one, on this rank; None where they cannot be counted.

    `batch` has a TensorLike in each tensor's place. Weights, buffers, generators and storage are left alone.
    """
    generators = generator_state()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _on_fakes(trainer), flop_counter() as counter:
            fakes = tree_map_only(TensorLike, lambda like: _fake(like, trainer.device), batch)
            for piece in trainer.micro_batches(fakes):
                loss = trainer.run_forward(piece).loss
                total = torch.as_tensor(loss.total) if isinstance(loss, Mean) else loss
                torch.autograd.grad(total, _trained(trainer.model), allow_unused=True)
        return int(counter.get_total_flops())
    except Exception as error:  # a user's forward may read values, which are not there
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.info("The operations of a step could not be counted: %s", reason)
        return None
    finally:
        restore_generators(generators)


def _attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Two products for each query head, [B, heads, positions, width], whether or not heads share keys."""
    return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: Any, **___: Any) -> int:
    """Five products: the scores once more, then the gradients of scores, values, queries and keys."""
    return 2 * math.prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def _fake(like: TensorLike, device: torch.device) -> Tensor:
    """A tensor without values, which takes no memory within a FakeTensorMode."""
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _trained(model: torch.nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@contextmanager
def _on_fakes(trainer: Trainer) -> Iterator[None]:
    """Gives the model tensors without values, and the trainer a storage that nobody reads."""
    places: list[tuple[dict[str, Any], str, Tensor]] = [
        (held, name, tensor)
        for module in trainer.model.modules()
        for held in (module._parameters, module._buffers)
        for name, tensor in held.items()
        if tensor is not None
    ]
    fakes: dict[int, Tensor] = {}  # one for each tensor: tied weights stay tied
    for _, _, tensor in places:
        if id(tensor) not in fakes:
            fake = torch.empty_like(tensor)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
    storage, samples = trainer.storage, trainer.samples_in_hand
    try:
        for held, name, tensor in places:
            held[name] = fakes[id(tensor)]
        # Compiled code would run as it was compiled, for real tensors.
        with EventStorage() as unread, torch.compiler.set_stance("force_eager"):
            trainer.storage = unread
            yield
    finally:
        for held, name, tensor in places:
            held[name] = tensor
        trainer.storage, trainer.samples_in_hand = storage, samples
