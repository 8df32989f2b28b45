"""Trainers for common work: each overrides forward and evaluation only. The loop is loop/trainer.py's."""
