"""Optional acts, one a file, named for the act. The contract is loop/hook.py."""
