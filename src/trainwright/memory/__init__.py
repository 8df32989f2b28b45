"""Memory: which micro-batch fits (micro_batch.py), and what to say when none is left (out_of_memory.py)."""
