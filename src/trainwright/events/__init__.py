"""What happened: values are put here during a step and handed on at the log period. See storage.py."""

from trainwright.events.mean import Mean
from trainwright.events.storage import EventStorage, get_event_storage

__all__ = ["EventStorage", "Mean", "get_event_storage"]
