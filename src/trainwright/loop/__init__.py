"""The training loop: trainer.py has the loop, update.py one update, evaluation.py one pass over a set.

Read trainer.py first; a stack trace from a user's `forward` contains only train and train_step.
"""
