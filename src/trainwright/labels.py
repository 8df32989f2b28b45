"""The one label that means something to every loss, metric and collator."""

IGNORED_LABEL = -100
"""Labels of this value do not count: torch's and transformers' convention."""
