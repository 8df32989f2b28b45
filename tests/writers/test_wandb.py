"""The writer wandb, with the real package offline."""

import json
import math

import wandb
from tests.faults.runs import config_of, in_child, train
from tests.writers.services import wandb_lines
from tests.writers.test_writer import Drawing
from tests.writers.wandb_files import read_history, read_records

from trainwright import Hook, build_trainer
from trainwright.writers.wandb import WandbWriter

OPTIONS = ("log.every_steps=1", "trainer.max_steps=2")


class Diverging(Hook):
    def after_step(self):
        self.trainer.storage.put_scalar("ratio", math.nan if self.trainer.step == 1 else math.inf)


def records_of(folder):
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    return read_records(path)


def test_a_run_has_its_settings_numbers_images_histograms_texts_and_artifacts(tmp_path):
    writers = "writers=[json, {type: wandb, project: digits, tags: [small], artifacts: config.yaml}]"
    assert train(tmp_path / "run", *OPTIONS, writers, hooks=[Drawing(), Diverging()]) == 0
    records = records_of(tmp_path / "run")
    (run,), (end,), (artifact,) = records["run"], records["exit"], records["artifact"]
    run_id = json.loads((tmp_path / "run/environment.json").read_text())["run_id"]
    assert (run.run_id, run.display_name, run.project, list(run.tags)) == (run_id, "run", "digits", ["small"])
    settings = {each.key: json.loads(each.value_json) for each in run.config.update}
    assert settings["trainer.optimizer.lr"] == 0.01
    assert end.exit_code == 0
    assert [entry.path for entry in artifact.manifest.contents] == ["config.yaml"]
    first, second = read_history(tmp_path / "run")
    assert (first["step"], second["step"]) == (1, 2)
    assert isinstance(first["loss"], float)
    assert (str(first["ratio"]), str(second["ratio"])) == ("nan", "inf")
    assert first["note"] == "step 1"
    assert first["weights/_type"] == "histogram"
    assert sum(first["weights/values"]) == 32
    assert (first["pixels/_type"], first["pixels/height"], first["pixels/width"]) == ("image-file", 2, 2)


def test_a_failed_run_is_a_failed_run_there_too(tmp_path):
    class Failing(Hook):
        def before_step(self):
            raise ArithmeticError("no")

    assert train(tmp_path / "run", *OPTIONS, "writers=[wandb]", hooks=[Failing()]) == 1
    (end,) = records_of(tmp_path / "run")["exit"]
    assert end.exit_code == 1


def test_a_run_that_the_program_has_opened_is_used_and_left_open(tmp_path):
    def act():
        with wandb.init(project="own", dir=tmp_path / "run") as run:
            trainer = build_trainer(config_of(tmp_path / "run", *OPTIONS, "writers=[wandb]"))
            wandb.log({"before": 1})  # also advances wandb's own step
            trainer.train()
            assert wandb.run is run
            run.log({"after": 3})

    (tmp_path / "run").mkdir()
    assert in_child(act, tmp_path / "run") == 0
    rows = read_history(tmp_path / "run")
    assert [set(row) & {"before", "loss", "after"} for row in rows] == [{"before"}, {"loss"}, {"loss"}, {"after"}]
    assert [step for step, _ in wandb_lines(tmp_path / "run")] == [1, 2]


def test_without_an_account_the_run_is_recorded_for_later(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert train(tmp_path / "run", *OPTIONS, "writers=[wandb]") == 0
    assert [step for step, _ in wandb_lines(tmp_path / "run")] == [1, 2]
    assert "wandb sync" in (tmp_path / "run/log.txt").read_text()


def test_a_constructor_touches_nothing(tmp_path):
    WandbWriter(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
    assert wandb.run is None
