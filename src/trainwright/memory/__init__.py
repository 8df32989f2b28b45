"""The memory of a step: settings that reduce it, and the report when memory runs out (out_of_memory.py).

rewrite.py applies a model section's `activation_checkpointing`, `offload`, `tile` and `compile_repeated_blocks`; each
has its own file.
"""
