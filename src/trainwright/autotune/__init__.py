"""Finds settings by trial: the micro-batch size, and how many layers are recomputed."""
