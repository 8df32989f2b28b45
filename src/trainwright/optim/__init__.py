"""Optimizers, whose step() returns {metric: tensor}, and learning-rate schedules.

The loop decides when an update happens and with which gradients (loop/update.py).
"""
