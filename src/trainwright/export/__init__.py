"""Exports the weights of a run: load.py loads a checkpoint's model on any device."""
