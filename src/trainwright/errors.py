"""The errors that a user meets: what is wrong, what we got, where it came from, what to do.

Each takes the whole message and, where one is known, the place (`run.yaml:14`, `override trainer.lr=x`)
that the message starts with. Nothing here imports the rest of the package.
"""

from __future__ import annotations


class TrainwrightError(Exception):
    """An error that is explained to the user in words; the command line shows it without a traceback."""

    def __init__(self, problem: str, *, where: object | None = None) -> None:
        self.problem = problem
        self.where = where
        super().__init__(f"{where}: {problem}" if where is not None else problem)


class ConfigError(TrainwrightError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class ComponentError(ConfigError):
    """A component cannot be found, or its arguments do not fit its constructor."""


class CheckpointError(TrainwrightError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class DataError(TrainwrightError):
    """A dataset, a sample or a batch cannot be used."""
