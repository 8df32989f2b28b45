"""Devices: everything that differs between them is a method of a Backend. See backend.py."""

from trainwright.backends.backend import (
    Backend,
    Capture,
    begin_copy_to_host,
    checked_device,
    copy_to_host,
    expected_precision,
    has_capturable_optimizers,
    has_fused_optimizers,
    host_buffers,
    memory_in_use,
    pick_backend,
    reads_at_once,
    waits_for_memory,
)

__all__ = [
    "Backend",
    "Capture",
    "begin_copy_to_host",
    "checked_device",
    "copy_to_host",
    "expected_precision",
    "has_capturable_optimizers",
    "has_fused_optimizers",
    "host_buffers",
    "memory_in_use",
    "pick_backend",
    "reads_at_once",
    "waits_for_memory",
]
