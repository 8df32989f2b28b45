"""The machine: every act that differs between devices is a verb of a Backend. See backend.py."""

from trainwright.backends.backend import Backend, has_fused_optimizers, pick_backend

__all__ = ["Backend", "has_fused_optimizers", "pick_backend"]
