"""Trainers for common objectives: each overrides forward and evaluation only. The loop is in loop/trainer.py."""
