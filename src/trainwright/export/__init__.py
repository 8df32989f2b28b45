"""Weights that leave a run: load.py brings a checkpoint's model back, on any device."""
