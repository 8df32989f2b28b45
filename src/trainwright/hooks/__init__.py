"""Optional hooks, one per file. The contract is loop/hook.py."""
