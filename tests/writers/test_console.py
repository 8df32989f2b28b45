"""What the terminal shows."""

import io
import math
import re

import pytest

from trainwright import EventStorage
from trainwright.writers.console import ConsoleWriter


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return Terminal()


@pytest.fixture
def plain(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return io.StringIO()


def show(stream, *lines, max_steps=100):
    writer, storage = ConsoleWriter(stream), EventStorage(max_steps=max_steps)
    for step, values in lines:
        storage.step = step
        evaluated = {name: value for name, value in values.items() if name.startswith("valid/")}
        training = {name: value for name, value in values.items() if name not in evaluated}
        storage.publish(training, evaluated=evaluated)
        writer.write(storage)
    writer.close()
    return stream.getvalue()


def without_eta(text):
    return re.sub(r"  eta \S+", "  eta …", text)


def test_plain_lines_are_stable_text(plain):
    training = {"loss": 0.123456, "lr": 1e-3, "seconds_per_step": 0.5, "samples_per_second": 12345.6}
    text = show(plain, (10, training), (20, {**training, "valid/loss": 0.5, "valid/accuracy": 1.0}))
    assert without_eta(text) == (
        "step 10/100  loss 0.1235  lr 0.001  12,346 samples/s\n"
        "step 20/100  loss 0.1235  lr 0.001  12,346 samples/s  eta …\n"
        "step 20  valid/loss 0.5  valid/accuracy 1\n"
    )


def test_tokens_are_the_speed_where_they_are_known(plain):
    text = show(plain, (1, {"loss": 1.0, "samples_per_second": 5.0, "tokens_per_second": 5120.0}))
    assert text == "step 1/100  loss 1  5,120 tokens/s\n"


def test_a_nan_is_shown(plain):
    assert show(plain, (1, {"loss": math.nan, "grad_norm": math.inf})) == "step 1/100  loss nan  grad_norm inf\n"


def test_a_text_that_was_put_is_a_line_of_its_own(plain):
    writer, storage = ConsoleWriter(plain), EventStorage(max_steps=9)
    storage.step = 3
    storage.put_text("sample", "To be\x1b[2J [bold]or not")
    storage.publish({"loss": 1.0}, media=storage.take_media())
    writer.write(storage)
    writer.close()
    assert plain.getvalue() == "step 3/9  loss 1\nstep 3  sample: To be\\x1b[2J [bold]or not\n"


def test_a_line_without_a_loss_is_shown_too(plain):
    assert show(plain, (1, {"reward": 2.0})) == "step 1/100  reward 2\n"


def test_an_evaluation_alone_shows_no_progress(plain):
    assert show(plain, (7, {"valid/loss": 0.25})) == "step 7  valid/loss 0.25\n"


def test_rates_of_several_optimizers_are_part_of_the_progress(plain):
    assert show(plain, (1, {"loss": 1.0, "lr/a": 0.1}), max_steps=None) == "step 1  loss 1  lr/a 0.1\n"


def test_long_lines_are_not_wrapped_and_brackets_are_not_markup(plain):
    values = {"loss": 1.0, **{f"metric[bold]{number}": 1.5 for number in range(30)}}
    text = show(plain, (1, values))
    assert text.count("\n") == 1
    assert "metric[bold]29 1.5" in text


def test_a_terminal_shows_one_line_that_is_overwritten_and_keeps_evaluations(terminal):
    lines = [(step, {"loss": step / 8}) for step in (1, 2)]
    text = show(terminal, *lines, (3, {"loss": 3.0, "valid/loss": 0.5}), (4, {"loss": 4.0}))
    assert "\x1b[2K" in text  # erases the line
    rows = _screen(text)
    assert rows[0].startswith("step 3  valid/loss 0.5")
    assert rows[1].startswith("step 4/100  loss 4")
    assert len(rows) == 2


def test_a_long_line_in_a_terminal_stays_one_line(terminal):
    values = {f"metric_{number}": 1.5 for number in range(30)}
    rows = _screen(show(terminal, (1, {"loss": 1.0, **values}), (2, {"loss": 2.0, **values})))
    assert len(rows) == 1
    assert rows[0].startswith("step 2/100  loss 2")
    assert len(rows[0]) <= 60
    assert rows[0].endswith("…")


def test_the_time_left_is_shown_as_a_clock(plain, monkeypatch):
    clock = iter([0.0, 50.0, 50.0, 7200.0, 7200.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    text = show(plain, (10, {"loss": 1.0}), (20, {"loss": 1.0}), (30, {"loss": 1.0}), max_steps=1000)
    assert re.findall(r"eta (\S+)", text)[0] == "1:21:40"


def _screen(text):
    """What a terminal would show: carriage returns, erased lines and cursor moves carried out."""
    rows, row, column = [""], 0, 0
    for code, character in re.findall(r"\x1b\[([?0-9;]*[A-Za-z])|(.|\n)", text):
        if code == "2K":
            rows[row] = ""
        elif code.endswith("A"):
            row -= int(code[:-1] or 1)
        elif character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif character:
            rows[row] = rows[row][:column].ljust(column) + character + rows[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in rows if line.strip()]
