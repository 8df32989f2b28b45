"""How a run proceeds: trainer.py is the loop, update.py one update, evaluation.py one pass over a set.

Read trainer.py first; a stack trace from a user's `forward` leads through train, train_step and nothing else.
"""
