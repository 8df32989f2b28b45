"""The machine: every act that differs between devices is a verb of a Backend. See backend.py."""

from trainwright.backends.backend import Backend, pick_backend

__all__ = ["Backend", "pick_backend"]
