"""TensorBoard reads what was written, also after a resume."""

import io
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2
from tests.faults.runs import config_of
from tests.messages import raises
from tests.writers.test_writer import Drawing, make

from trainwright import EventStorage, RunConfig, build_trainer
from trainwright.errors import ComponentError
from trainwright.writers.tensorboard import TensorBoardWriter
from trainwright.writers.writer import RunInfo


def write(folder, *lines, from_step=None, settings=None):
    writer, storage = TensorBoardWriter(folder), EventStorage()
    if from_step is not None:
        config = RunConfig.from_dict(settings or {})
        writer.begin(RunInfo(config, "run", "id", folder, from_step, is_resumed=from_step > 0))
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


def test_what_an_earlier_process_wrote_after_the_checkpoint_is_hidden_also_without_a_line_at_its_steps(tmp_path):
    write(tmp_path, *((step, {"loss": float(step)}) for step in (1, 2, 3, 4, 5)), from_step=0).close()
    write(tmp_path, (6, {"loss": 16.0}), from_step=2).close()
    assert read(tmp_path, "loss") == [(1, 1.0), (2, 2.0), (6, 16.0)]


def hparams_of(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    plugin = events.SummaryMetadata
    contents = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(plugin(tag).plugin_data.content)
        for tag in events.PluginTagToContent("hparams")
    }
    started = contents["_hparams_/session_start_info"].session_start_info.hparams
    values = {name: each.string_value or each.number_value for name, each in started.items()}
    metrics = [each.name.tag for each in contents["_hparams_/experiment"].experiment.metric_infos]
    return values, metrics, "_hparams_/session_end_info" in contents


def test_the_settings_are_hparams_with_the_metrics_of_training_and_evaluation(tmp_path):
    settings = {
        "trainer": {"optimizer": {"type": "sgd", "lr": 0.5}, "max_steps": 3},
        "data": {"train": "digits", "eval": {"valid": "digits"}},
        "evaluation": {"metrics": {"accuracy": "accuracy"}},
    }
    write(tmp_path, (1, {"loss": 0.5, "note": "text"}), from_step=0, settings=settings).close()
    values, metrics, has_ended = hparams_of(tmp_path)
    assert (values["trainer.optimizer.type"], values["trainer.optimizer.lr"]) == ("sgd", 0.5)
    assert metrics == ["loss", "valid/loss", "valid/accuracy"]
    assert has_ended
    assert read(tmp_path, "loss") == [(1, 0.5)]


def test_images_histograms_and_texts_of_a_run_are_read_back(tmp_path):
    class Painting(Drawing):
        def after_step(self):
            super().after_step()
            storage = self.trainer.storage
            storage.put_image("pixels", torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]], [[0.0, 0.0]]]))
            storage.put_histogram("empty", torch.full((3,), math.nan))

    make(tmp_path / "run", "trainer.max_steps=2", "writers=[tensorboard]", hooks=[Painting()]).train()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"histograms": 0})
    events.Reload()
    assert events.Tags()["images"] == ["pixels"]
    image = np.asarray(Image.open(io.BytesIO(events.Images("pixels")[1].encoded_image_string)))
    assert image.tolist() == [[[0, 255, 0], [255, 0, 0]]]
    assert events.Tags()["histograms"] == ["weights"]
    first, second = events.Histograms("weights")
    assert (first.step, second.step) == (1, 2)
    histogram = second.histogram_value
    assert (histogram.num, sum(histogram.bucket)) == (32, 32)
    assert histogram.min < 0 < histogram.max
    (text, _) = events.Tensors("note/text_summary")
    assert text.tensor_proto.string_val == [b"step 1"]


@pytest.mark.parametrize(
    ("writer", "package"),
    [
        ("tensorboard", "torch.utils.tensorboard"),
        ("wandb", "wandb"),
        ("mlflow", "mlflow"),
        ("trackio", "trackio"),
    ],
)
def test_without_the_package_the_error_says_how_to_install_it(tmp_path, monkeypatch, writer, package):
    monkeypatch.delitem(sys.modules, f"trainwright.writers.{writer}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    config = config_of(tmp_path / "run", f"writers=[json, {writer}]")
    with raises(
        ComponentError, "writers.1.type", f"pip install 'trainwright[{writer}]'", at=f"writers=[json, {writer}]"
    ):
        build_trainer(config)
    assert not (tmp_path / "run").exists()
