"""Finds settings by trial steps: learning rate, micro-batch size, recomputed layers, number of workers."""
