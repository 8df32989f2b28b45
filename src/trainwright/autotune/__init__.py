"""Finds settings by trial steps: the micro-batch size and the number of recomputed layers."""
