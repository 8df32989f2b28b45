"""TensorBoard reads what was written, also after a resume."""

import math
import sys

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.messages import raises

from trainwright import EventStorage
from trainwright.errors import ConfigError
from trainwright.writers.tensorboard import TensorBoardWriter


def write(folder, *lines):
    writer, storage = TensorBoardWriter(folder), EventStorage()
    for step, values in lines:
        storage.step = step
        storage.publish(values)
        writer.write(storage)
    return writer


def read(folder, name):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_numbers_are_read_back_by_name_and_step(tmp_path):
    write(tmp_path, (1, {"loss": 0.5, "valid/loss": 2.0, "note": "text"}), (2, {"loss": math.nan, "count": 3})).close()
    (first, second) = read(tmp_path, "loss")
    assert first == (1, 0.5)
    assert math.isnan(second[1])
    assert read(tmp_path, "valid/loss") == [(1, 2.0)]
    assert read(tmp_path, "count") == [(2, 3.0)]


def test_a_line_can_be_read_while_the_run_goes_on(tmp_path):
    writer = write(tmp_path, (1, {"loss": 0.5}))
    assert read(tmp_path, "loss") == [(1, 0.5)]
    writer.close()
    writer.close()


def test_a_resumed_run_hides_what_it_repeats(tmp_path):
    write(tmp_path, *((step, {"loss": float(step)}) for step in (2, 4, 6, 8))).close()
    write(tmp_path, *((step, {"loss": 10.0 + step}) for step in (6, 8, 10))).close()
    assert read(tmp_path, "loss") == [(2, 2.0), (4, 4.0), (6, 16.0), (8, 18.0), (10, 20.0)]


def test_nothing_is_written_before_the_first_line(tmp_path):
    TensorBoardWriter(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with raises(ConfigError):
        write(tmp_path, (1, {"loss": np.float64(0.5)}))
