"""Under its former path, for loop/calls.py: see backends/private_torch.py."""

from trainwright.backends.private_torch import constant_in_compiled_code

__all__ = ["constant_in_compiled_code"]
