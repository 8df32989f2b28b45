"""Checkpoints: what is saved, how it reaches the disk whole, and which ones are kept.

`encoding.py` turns a state into JSON and tensors, `store.py` writes and reads step folders, `retention.py` says
which to delete. What a run saves and how it resumes is decided in `contents.py` and `resume.py`.
"""
