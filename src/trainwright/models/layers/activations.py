"""The activation functions that models choose by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainwright.errors import ConfigError

Activation = Callable[[Tensor], Tensor]

_GELU_BY_TANH = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_new": _GELU_BY_TANH,
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


def activation(name: str, *, setting: str = "activation") -> Activation:
    """Returns the function of this name, or refuses one that there is none for; `setting` is who gave the name."""
    if name not in ACTIVATIONS:
        raise ConfigError(f'{setting} is "{name}". Use one of: {", ".join(ACTIVATIONS)}.')
    return ACTIVATIONS[name]
