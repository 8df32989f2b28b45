"""Checkpoints: their contents, how they are written atomically, and which ones are kept.

`encoding.py` converts a state to JSON and tensors, `store.py` writes and reads step folders, `retention.py` selects the
ones to delete. `contents.py` and `resume.py` define what a run saves and how it resumes.
"""
