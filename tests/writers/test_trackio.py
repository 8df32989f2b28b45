"""The writer trackio, with the real package and its local store."""

import json

from tests.faults.runs import train
from tests.writers.services import trackio_rows
from tests.writers.test_wandb import Diverging
from tests.writers.test_writer import Drawing

OPTIONS = ("log.every_steps=1", "trainer.max_steps=2")


def test_a_run_has_its_numbers_images_histograms_and_texts_and_fresh_is_another_run(tmp_path):
    writers = f"writers=[{{type: trackio, project: {tmp_path.name}, artifacts: config.yaml}}]"
    assert train(tmp_path / "run", *OPTIONS, writers, hooks=[Drawing(), Diverging()]) == 0
    (name, first_step, first), (_, second_step, second) = trackio_rows(tmp_path.name)
    assert name == f"run-{json.loads((tmp_path / 'run/environment.json').read_text())['run_id']}"
    assert (first_step, second_step) == (1, 2)
    assert isinstance(first["loss"], float)
    assert (first["ratio"], second["ratio"]) == ("NaN", "Infinity")
    assert first["pixels"]["_type"] == "trackio.image"
    assert sum(first["weights"]["values"]) == 32
    assert first["note"]["_value"] == "step 1"
    (tmp_path / "run").rename(tmp_path / "earlier")
    assert train(tmp_path / "run", *OPTIONS, writers) == 0
    assert len({name for name, _, _ in trackio_rows(tmp_path.name)}) == 2


def test_a_server_that_cannot_be_reached_does_not_stop_training(tmp_path):
    address = "http://127.0.0.1:9/?write_token=abc123"
    writers = f"writers=[{{type: trackio, server_url: '{address}', project: {tmp_path.name}, timeout_seconds: 8}}]"
    assert train(tmp_path / "run", *OPTIONS, writers) == 0
    assert "abc123" not in (tmp_path / "run/config.yaml").read_text() + (tmp_path / "run/log.txt").read_text()
