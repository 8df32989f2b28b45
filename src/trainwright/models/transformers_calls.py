"""What happens at each call of a transformers model: no cache while it learns, and packed documents stay apart.

Borders of packed rows (data/pack.py) reach these models by `position_ids`, which restart at each document and from
which most of them make their attention mask, or by a mask of two dims. Some take the positions and mask nothing. No
attribute tells which, so the model itself is asked, once, with a row of four tokens.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import ConfigError

logger = logging.getLogger(__name__)

POSITIONS, DOCUMENTS = (0, 1, 0, 1), (0, 0, 1, 1)
"""The row of the question: two documents of two tokens."""


def watch_calls(model: nn.Module, *, leaves_cache: bool) -> None:
    """Has every call of a model looked at before it is made; `leaves_cache` leaves `use_cache` to the config."""
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    model.register_forward_pre_hook(_Watch(sets_cache=takes_cache and not leaves_cache), with_kwargs=True)


class _Watch:
    """The hook of one model; a copy of the model has a copy of it."""

    def __init__(self, *, sets_cache: bool) -> None:
        self._sets_cache = sets_cache
        self._asked = False

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not self._asked and _has_borders(kwargs):
            self._asked = True  # first, for the question is a call as well
            _refuse_crossing(model, kwargs)
        # Keys and values of a training batch serve nobody, and with a cache transformers reads no borders from the
        # positions. By keyword: the config is written as it was read.
        given = any(kwargs.get(name) is not None for name in ("labels", "position_ids", "document_ids"))
        if self._sets_cache and (model.training or given):
            kwargs.setdefault("use_cache", False)
        return args, kwargs


def _has_borders(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("document_ids") is not None or _is_square(kwargs.get("attention_mask"))


def _is_square(mask: Any) -> bool:
    return isinstance(mask, Tensor) and mask.dim() == 4


def _refuse_crossing(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuses a model in which a packed document sees another one, where the batch asks it not to."""
    tokens = kwargs.get("input_ids")
    if not isinstance(tokens, Tensor):
        return
    try:
        crosses = _crosses_borders(model, _question(tokens, kwargs))
    except Exception as error:  # of any kind: the model is anybody's
        logger.warning(
            "%s could not be asked whether packed documents stay apart in it: %s: %s",
            type(model).__name__, type(error).__name__, error,
        )  # fmt: skip
        return
    if not crosses:
        return
    name = type(model).__name__
    if _is_square(kwargs.get("attention_mask")):
        raise ConfigError(
            f"Packed documents see each other in {name}, which does not heed a mask of two dims as the data gives it "
            "(borders: mask). Set attn_implementation: sdpa in the model section, or use borders: documents, rows of "
            "one document each, or another model; borders: none accepts it."
        )
    raise ConfigError(
        f"Packed documents see each other in {name}, which does not read their borders from position_ids. Set borders: "
        "mask in the section of the data that packs them, or use rows of one document each, or another model; "
        "borders: none accepts it."
    )


def _question(tokens: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns a row of two documents, in the form in which this batch gives its own."""
    # Plain tensors also where an evaluation runs without autograd; a token of the batch is one that the model has.
    with torch.inference_mode(False):
        row = torch.full((1, len(POSITIONS)), int(tokens.flatten()[0]), dtype=tokens.dtype, device=tokens.device)
        documents = torch.tensor([DOCUMENTS], device=tokens.device)
        given = {"input_ids": row}
        if kwargs.get("position_ids") is not None:
            given["position_ids"] = torch.tensor([POSITIONS], device=tokens.device)
        if kwargs.get("document_ids") is not None:
            given["document_ids"] = documents
        mask = kwargs.get("attention_mask")
        if _is_square(mask):
            assert mask is not None
            apart = (documents[:, None, :, None] == documents[:, None, None, :]).tril()
            # A mask that is added has zeros where a token is seen.
            hidden = torch.zeros(apart.shape, dtype=mask.dtype, device=mask.device)
            is_added = mask.dtype.is_floating_point
            given["attention_mask"] = (
                hidden.masked_fill(~apart, torch.finfo(mask.dtype).min) if is_added else apart.to(mask.dtype)
            )
        return given


def _crosses_borders(model: nn.Module, row: dict[str, Tensor]) -> bool:
    """Does what the model says of the second document depend on the first?

    Asked by a gradient, which is exactly zero where there is no way from one to the other; two outputs that are
    compared would differ by rounding, in 16 bits by more than an untrained model's attention does.
    """
    embedded: list[Tensor] = []

    def take(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    with _set_aside(model), torch.inference_mode(False), torch.enable_grad():
        handle = embedding.register_forward_hook(take)
        try:
            output = model(**row)
        finally:
            handle.remove()
        states = output[0]
        if states.shape[:2] != row["input_ids"].shape or not embedded:
            return False  # one answer for the whole row: it has no documents
        second = torch.tensor(DOCUMENTS, device=states.device) == 1
        # Squares, for a plain sum of normalised states is a constant.
        [gradient] = torch.autograd.grad(states[0, second].float().square().sum(), embedded[0])
    return bool(gradient[0, :2].any())


@contextmanager
def _set_aside(model: nn.Module) -> Iterator[None]:
    """Has the model answer without dropout, and leaves its modes and the generators as they were."""
    modes = {module: module.training for module in model.modules()}
    used = {parameter.device for parameter in model.parameters()}
    devices = [device for device in used if device.index is not None]
    kind = devices[0].type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
