"""The rewards of run.yaml: a class with an argument, and a function."""


class Correct:
    """`reward` for a completion that is the row's answer, else 0."""

    def __init__(self, reward=1.0):
        self.reward = reward

    def __call__(self, completions, answer, **columns):
        return [self.reward * (one.strip() == expected) for one, expected in zip(completions, answer, strict=True)]


def digits_only(completions, **columns):
    """1 for a completion that consists of digits."""
    return [float(one.isdigit()) for one in completions]
