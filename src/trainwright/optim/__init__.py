"""Updates: the optimizers, whose step() returns {metric: tensor}, and the schedules of their learning rates.

When an update happens, and with which gradients, is the loop's business (loop/update.py).
"""
