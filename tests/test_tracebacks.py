"""A traceback shows the user's frames; those of libraries and ours are counted."""

import sys

import pytest
import torch
from tests.messages import mentions

from trainwright.loop.task import Task
from trainwright.tracebacks import fold


def caught(function):
    with pytest.raises(Exception) as info:
        function()
    return info.value


class Broken(torch.nn.Module):
    def forward(self, x):
        return self.reshape(x)

    def reshape(self, x):
        return torch.nn.functional.linear(x, torch.zeros(3, 7))


def test_the_users_frames_are_whole_and_the_others_folded():
    text = fold(caught(lambda: Task().forward(Broken(), {"x": torch.zeros(2, 5)})))
    assert mentions(text, "torch.nn.functional.linear", "torch.zeros", "3", "7")
    assert mentions(text, "self.reshape")
    assert "  … 1 frame of trainwright, 2 frames of torch\n" in text
    assert "loop/task.py" not in text
    assert text.endswith("\n")
    assert mentions(text, "RuntimeError")


def test_an_error_without_a_frame_of_the_users_is_shown_whole(monkeypatch):
    # As if this file were a library: then the mistake is nobody's but ours.
    monkeypatch.setattr("trainwright.tracebacks._LIBRARIES", ("/",))
    error = caught(lambda: Task().forward(Broken(), {}))
    assert "Broken.forward requires x" in str(error)
    text = fold(error)
    assert text.startswith("Traceback (most recent call last):\n")
    assert "user_code/signatures.py" in text


def test_the_last_line_is_pythons_own():
    error = caught(lambda: int("three"))
    assert fold(error).splitlines()[-1] == f"ValueError: {error}"
    assert "test_tracebacks.py" in fold(error)
    assert sys.exc_info() == (None, None, None)
