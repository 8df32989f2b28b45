"""Names for tensors inside a forward pass, so that settings of the config can refer to them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary


def name_tensor(tensor: Tensor, name: str) -> Tensor:
    """Returns the tensor itself, and passes its name to an active mode of torch.overrides.

    Many tensors may share a name, such as the inputs of all blocks. Compiled code ignores names, so name a block's
    input where the block is called.

    >>> hidden = torch.zeros(2)
    >>> name_tensor(hidden, "decoder_input") is hidden
    True
    """
    if not torch.compiler.is_compiling() and has_torch_function_unary(tensor):
        answer: Tensor = handle_torch_function(name_tensor, (tensor,), tensor, name)
        return answer
    return tensor
