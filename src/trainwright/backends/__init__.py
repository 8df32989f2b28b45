"""The machine: every act that differs between devices is a verb of a Backend. See backend.py."""

from trainwright.backends.backend import (
    Backend,
    has_fused_optimizers,
    memory_in_use,
    pick_backend,
    waits_for_memory,
)

__all__ = ["Backend", "has_fused_optimizers", "memory_in_use", "pick_backend", "waits_for_memory"]
