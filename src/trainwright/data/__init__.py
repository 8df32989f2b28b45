"""From rows to batches: order.py says which sample comes when, loader.py fetches it, collators.py batches it."""
