"""The writer mlflow, with the real package and a store in a folder."""

import json
import math

import mlflow
import pytest
from tests.messages import check_message
from tests.writers.test_writer import Drawing, make

from trainwright import Hook, Trainer

OPTIONS = ("trainer.max_steps=2",)


@pytest.fixture
def client(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    return mlflow.MlflowClient()


def only_run(client, experiment="trainwright"):
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return run


def files(client, run, folder=None):
    found = []
    for each in client.list_artifacts(run.info.run_id, folder):
        found += files(client, run, each.path) if each.is_dir else [each.path]
    return found


def history(client, run, name):
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]


class Odd(Hook):
    def after_step(self):
        self.trainer.storage.put_scalars({"nan": math.nan, "inf": math.inf, "a|b (%)": 1.0})


def test_a_run_has_its_settings_numbers_images_histograms_texts_and_artifacts(tmp_path, client):
    writers = "writers=[json, {type: mlflow, experiment: digits, artifacts: [config.yaml, checkpoints/*2]}]"
    make(tmp_path / "run", *OPTIONS, writers, hooks=[Drawing(), Odd()]).train()
    run = only_run(client, "digits")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.tags["trainwright.run_id"] == json.loads((tmp_path / "run/environment.json").read_text())["run_id"]
    assert run.data.params["trainer.optimizer.lr"] == "0.01"
    assert [step for step, _ in history(client, run, "loss")] == [1, 2]
    assert [math.isnan(value) for _, value in history(client, run, "nan")] == [True, True]
    assert history(client, run, "inf")[0][1] > 1e308
    assert history(client, run, "a_b ___") == [(1, 1.0), (2, 1.0)]
    found = files(client, run)
    assert "config.yaml" in found
    assert "checkpoints/step-00000002/MANIFEST.json" in found
    assert "texts/note/step-00000001.txt" in found
    assert sum(path.startswith("images/pixels") and path.endswith(".png") for path in found) == 2
    path = client.download_artifacts(run.info.run_id, "histograms/weights/step-00000002.json", str(tmp_path))
    with open(path) as file:  # noqa: PTH123  # a path of mlflow
        assert sum(json.load(file)["counts"]) == 32


def test_a_resumed_run_is_running_again_and_a_changed_setting_becomes_a_tag(tmp_path, client):
    class Failing(Trainer):
        def train_step(self, batch):
            if self.step == 4:
                raise ArithmeticError("no")
            return super().train_step(batch)

    with pytest.raises(ArithmeticError):
        make(tmp_path / "run", "writers=[json, mlflow]", trainer=Failing).train()
    assert only_run(client).info.status == "FAILED"
    make(tmp_path / "run", "trainer.max_steps=8", "writers=[json, mlflow]").train()
    run = only_run(client)
    assert run.info.status == "FINISHED"
    assert (run.data.params["trainer.max_steps"], run.data.tags["trainer.max_steps"]) == ("6", "8")
    assert [step for step, _ in history(client, run, "loss")] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_that_the_program_has_opened_is_used_and_left_open(tmp_path, client):
    mlflow.set_experiment("own")
    with mlflow.start_run() as opened:
        make(tmp_path / "run", *OPTIONS, "writers=[mlflow]").train()
        assert mlflow.active_run().info.run_id == opened.info.run_id
        assert only_run(client, "own").info.status == "RUNNING"
    assert [step for step, _ in history(client, only_run(client, "own"), "loss")] == [1, 2]


def test_a_server_that_cannot_be_reached_is_logged_and_training_continues(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    uri = "http://me:hunter2@127.0.0.1:9"
    trainer = make(tmp_path / "run", *OPTIONS, f"writers=[{{type: mlflow, tracking_uri: '{uri}'}}]")
    trainer.train()
    assert trainer.step == 2
    (message,) = [record.getMessage() for record in caplog.records if record.name == "trainwright.writers.tracker"]
    check_message(message, "mlflow", "127.0.0.1", golden=False)
    assert "hunter2" not in message
    assert "hunter2" not in (tmp_path / "run/config.yaml").read_text()
