"""What the tests of mistakes share: an error's text, and the line of a file that it must begin with."""

from pathlib import Path

import pytest

from trainwright.errors import TrainwrightError


def rejection(call, *arguments, **options):
    """The text of the explained error that a call ends with."""
    with pytest.raises(TrainwrightError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def place(file, text):
    """`file:line` of the first line of a file that holds a text."""
    lines = Path(file).read_text("utf-8").splitlines()
    return f"{file}:{next(number for number, line in enumerate(lines, 1) if text in line)}: "
