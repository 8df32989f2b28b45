"""How a run goes, read from its classes: found.py finds and reads them, story.py tells the loop. Nothing is built."""

from trainwright.explaining.story import Line, explain

__all__ = ["Line", "explain"]
