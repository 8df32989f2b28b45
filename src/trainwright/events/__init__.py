"""The logged values of a run: a step puts them, and writers receive them once per log period. See storage.py."""

from trainwright.events.mean import Mean
from trainwright.events.storage import EventStorage, get_event_storage

__all__ = ["EventStorage", "Mean", "get_event_storage"]
