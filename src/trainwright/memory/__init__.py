"""Memory: which micro-batch fits (micro_batch.py), what to say when none is left (out_of_memory.py), what a step holds.

The last is rewrite.py: a model section's `activation_checkpointing`, `offload`, `tile` and `compile_repeated_blocks`,
each in a file of its own.
"""
