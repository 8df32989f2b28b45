"""How a run goes, read from its classes: found.py finds them, story.py tells the loop, weights.py the weights.

Nothing is built, but for shipped models without memory.
"""

from trainwright.explaining.story import Line, explain

__all__ = ["Line", "explain"]
