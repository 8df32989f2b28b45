"""What is read of run folders: real ones, damaged ones, and ones that others wrote."""

import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from tests.watch.folders import HOSTILE, write_hostile_run, write_lines

from trainwright.anomaly import reports
from trainwright.checkpoint import run_folder
from trainwright.watch import run_reader
from trainwright.watch.run_reader import Loader, RunReader, read_system
from trainwright.writers import media_files, system_log


@pytest.fixture
def broken(runs):
    reader = RunReader(runs / "group" / "broken", "group/broken")
    reader.load()
    return reader


def kinds(reader, kind):
    return [mark["step"] for mark in reader.marks() if mark["kind"] == kind]


def test_the_curves_of_a_run_are_those_of_its_log(broken):
    lines = [json.loads(line) for line in (broken.path / "metrics.json").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    curve = broken.curve("loss")
    assert curve.steps.tolist() == list(range(1, 13))
    for line, value in zip(lines, curve.values, strict=True):
        assert np.isnan(value) if line["loss"] is None else value == line["loss"]
    assert {"loss", "lr", "grad_norm", "valid/loss", "valid/accuracy", "system/memory"} <= set(broken.names())
    assert "sample" not in broken.names()


def test_anomalies_restarts_and_checkpoints_are_marked(broken):
    assert kinds(broken, "anomaly") == [3]
    assert kinds(broken, "restart") == [6]
    saved = {int(path.name.removeprefix("step-")) for path in (broken.path / "checkpoints").glob("step-*")}
    assert set(kinds(broken, "checkpoint") + kinds(broken, "best")) == saved
    best = broken.best_checkpoint()
    assert kinds(broken, "best") == [best]
    values = broken.curve("valid/loss")
    known = {step: value for step, value in zip(values.steps, values.values, strict=True) if step in saved}
    assert known[best] == min(known.values())


def test_evaluation_metrics_have_a_best_value(broken):
    described = {each["name"]: each for each in broken.describe()["names"]}
    losses, accuracies = broken.curve("valid/loss"), broken.curve("valid/accuracy")
    assert described["valid/loss"]["mode"] == "min"
    assert described["valid/loss"]["best"][1] == np.nanmin(losses.values)
    assert described["valid/accuracy"]["mode"] == "max"
    assert described["valid/accuracy"]["best"][1] == accuracies.values.max()
    assert described["loss"]["mode"] is None
    assert described["loss"]["best"] is None


def test_benchmarks_are_evaluation_sets(tmp_path):
    benchmarks = "[{type: multiple_choice, path: data/arc.jsonl}, {type: a.py:Mine, name: own}, {type: 3}, 4]"
    (tmp_path / "config.yaml").write_text(
        f"data: {{eval: {{dev: {{type: x}}}}}}\nevaluation: {{benchmarks: {benchmarks}}}"
    )
    reader = RunReader(tmp_path, "run")
    sets = reader.evaluation_sets()
    assert sets[:3] == ["dev", "arc", "own"]
    assert reader.best_mode("arc/accuracy", sets) == "max"
    assert reader.best_mode("dev/perplexity", sets) == "min"
    assert reader.best_mode("other/accuracy", sets) is None


def test_the_summary_of_the_model_is_complete(broken):
    model = broken.model()
    assert model["class"] == "Net"
    assert sum(size for name, _, size, _ in model["modules"] if "." not in name) == model["num_parameters"]
    assert broken.environment()["torch"]
    assert broken.settings()["trainer.optimizer.lr"] == 0.01


def test_media_have_their_steps_and_files(broken):
    media = broken.media()
    assert [each["step"] for each in media["images"]["weights"]] == [2, 4, 6, 8, 10, 12]
    for each in media["images"]["weights"]:
        content = broken.image(each["file"])
        assert content.startswith(b"\x89PNG")
        assert (each["width"], each["height"]) == (12, 8)
    assert sum(media["histograms"]["weights"][-1]["counts"]) == media["histograms"]["weights"][-1]["num_values"]
    assert media["texts"]["sample"][-1] == {"step": 12, "text": f"{HOSTILE} at 12"}


def test_axes_ascend_and_leave_out_the_time_between_processes():
    text = "".join(
        json.dumps(line) + "\n"
        for line in (
            {"time": 1000.0, "step": 0, "start": True},
            {"time": 1001.0, "step": 1, "memory": 5},
            {"time": 1010.0, "step": 10, "memory": 6},
            {"time": 1020.0, "step": 20, "memory": 7},  # lost by the kill
            {"time": 9000.0, "step": 10, "start": True},
            {"time": 9002.0, "step": 12, "memory": 8},
        )
    )
    system = read_system(text + '{"time": 1, "st')
    assert system.starts == ((0, 1000.0), (10, 9000.0))
    assert system.seconds.steps.tolist() == [1, 10, 12]
    assert system.seconds.values.tolist() == [1, 10, 12]
    assert system.curves["system/memory"].values.tolist() == [5, 6, 8]


def test_the_system_log_of_a_month_is_read(tmp_path):
    facts = {"cpu_cores": 1.0, "memory": 123456789, "memory_available": 123456789, "device_memory": 123456789}
    start = {"time": 0.0, "step": 0, "start": True}
    write_lines(tmp_path / "system.json", start, *({"time": 60.0 * n, "step": n, **facts} for n in range(1, 43_201)))
    assert (tmp_path / "system.json").stat().st_size > 2**22
    assert len(RunReader(tmp_path, "run").system().curves["system/memory"].steps) == 43_200


def test_axes_without_a_system_log_follow_from_the_rates(tmp_path):
    lines = [{"step": 10 * n, "seconds_per_step": 0.5, "tokens_per_second": 100.0} for n in range(1, 5)]
    write_lines(tmp_path / "metrics.json", *lines)
    reader = RunReader(tmp_path, "run")
    reader.load()
    axes = reader.axes()
    assert axes["seconds"] == [[0, 10, 20, 30, 40], [0, 5, 10, 15, 20]]
    assert axes["tokens"] == [[0, 10, 20, 30, 40], [0, 500, 1000, 1500, 2000]]


def test_the_version_of_a_part_changes_with_its_files_only(runs, tmp_path):
    shutil.copytree(runs / "plain", tmp_path / "plain")
    reader = RunReader(tmp_path / "plain", "plain")
    before = reader.version()
    assert reader.version() == before
    with (tmp_path / "plain" / "log.txt").open("a") as log:
        log.write("more\n")
    after = reader.version()
    assert {part for part in before if before[part] != after[part]} == {"log"}
    write_lines(tmp_path / "plain" / "metrics.json", {"step": 13, "loss": 1.0})
    assert reader.version()["curves"] != after["curves"]


def test_a_long_file_is_read_by_a_thread_and_a_sample_is_shown_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(run_reader, "_INLINE_BYTES", 1000)
    write_lines(tmp_path / "metrics.json", *({"step": step, "loss": 1.0} for step in range(1, 5001)))
    reader, work = RunReader(tmp_path, "run"), []

    class Later(Loader):
        def __init__(self):
            """Without a thread."""

        def add(self, read_more):
            work.append(read_more)

    reader.load(Later())
    assert reader.version()["loading"]
    assert 200 < len(reader.curve("loss").steps) < 400
    sampled = reader.version()["curves"]
    reader.load(Later())
    assert len(work) == 1
    while work[0]():
        pass
    assert len(reader.curve("loss").steps) == 5000
    assert reader.version()["curves"] != sampled
    # The real thread does the same.
    write_lines(tmp_path / "metrics.json", *({"step": step, "loss": 1.0} for step in range(5001, 6001)))
    reader.load(Loader())
    end = time.monotonic() + 10
    while len(reader.curve("loss").steps) < 6000 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(reader.curve("loss").steps) == 6000


def test_the_log_is_read_from_an_offset_and_at_most_its_end(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("one\ntwo\nthr")
    reader = RunReader(tmp_path, "run")
    first = reader.log()
    assert first == {"text": "one\ntwo\n", "offset": 8, "begins": 0}
    path.write_text("one\ntwo\nthree\n")
    assert reader.log(8) == {"text": "three\n", "offset": 14, "begins": 8}
    assert reader.log(-5) == reader.log()
    path.write_text("line of a long log\n" * 100_000)
    end = reader.log(8)
    assert len(end["text"]) <= 2**17
    assert end["text"].startswith("line of")
    path.write_text("new\n")  # --fresh
    assert reader.log(end["offset"]) == {"text": "new\n", "offset": 4, "begins": 0}
    path.unlink()
    assert reader.log(4)["text"] == ""


def test_an_empty_or_deleted_folder_has_nothing(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        reader = RunReader(path, "run")
        reader.load()
        assert reader.names() == []
        assert reader.marks() == []
        assert reader.media() == {"images": {}, "histograms": {}, "texts": {}}
        assert (reader.settings(), reader.environment(), reader.model(), reader.axes()) == ({}, {}, {}, {})
        assert reader.summary().state == "damaged"


@pytest.mark.parametrize("content", ["", "[", "[1]", "\0", "a: &a [*a]", "{" * 100_000, "? {a: b}\n: 1"])
def test_damaged_files_are_empty(tmp_path, content):
    for name in ("config.yaml", "environment.json", "model.json", "system.json", "media/index.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    write_lines(tmp_path / "anomalies" / "step-00000001" / "anomaly.json", [1])
    reader = RunReader(tmp_path, "run")
    reader.load()
    assert reader.describe()["names"] == []
    assert reader.media()["images"] == {}
    assert isinstance(reader.settings(), dict)
    assert reader.summary().name == "run"


def test_settings_that_multiply_are_not_read(tmp_path):
    levels = ["a0: &a0 [x, y]", *(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}" for n in range(1, 40))]
    (tmp_path / "config.yaml").write_text("\n".join(levels))
    assert RunReader(tmp_path, "run").settings() == {}


def test_nothing_outside_of_the_run_folder_is_read(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"step": 1, "secret": 1}\n')
    run = write_hostile_run(tmp_path / "runs")
    for name in ("log.txt", "environment.json", "metrics.json"):
        (run / name).unlink()
        (run / name).symlink_to(secret)
    reader = RunReader(run, "run")
    reader.load()
    assert reader.log()["text"] == ""
    assert reader.environment() == {}
    assert reader.names() == []
    assert reader.summary().step is None
    assert reader.image("00000001-0.png") is None
    assert reader.image("../log.txt") is None
    assert len(reader.media()["images"][HOSTILE]) == 1


def test_a_pipe_does_not_block_the_reader(tmp_path):
    for name in ("log.txt", "metrics.json", "config.yaml", "system.json"):
        os.mkfifo(tmp_path / name)
    reader = RunReader(tmp_path, "run")
    reader.load()
    assert reader.log()["text"] == ""
    assert reader.summary().loss is None
    assert reader.describe()["names"] == []


def test_a_file_that_cannot_be_parsed_does_not_end_the_loader(caplog):
    def fail():
        raise MemoryError

    loader, is_read = Loader(), threading.Event()
    loader.add(fail)
    loader.add(lambda: is_read.set() or False)
    assert is_read.wait(10)
    assert "MemoryError" in caplog.text


def test_secrets_and_control_characters_are_not_shown(tmp_path):
    run = write_hostile_run(tmp_path)
    reader = RunReader(run, "run")
    assert reader.settings()["api_key"] == 123  # a number is no secret
    (run / "config.yaml").write_text("api_key: abc\nurl: https://me:hunter2@host\n")
    assert reader.settings() == {"api_key": "***", "url": "https://me:***@host"}
    assert "\x1b" not in reader.log()["text"]


def test_the_files_are_those_that_runs_write():
    assert run_reader.SYSTEM_FILE == system_log.SYSTEM_FILE
    assert (run_reader.MEDIA_FOLDER, run_reader.MEDIA_INDEX) == (media_files.MEDIA_FOLDER, media_files.INDEX_FILE)
    assert run_reader.ENVIRONMENT_FILE == run_folder.ENVIRONMENT_FILE
    assert run_reader.MODEL_FILE == run_folder.MODEL_FILE
    assert run_reader.ANOMALIES_FOLDER == reports.ANOMALIES_FOLDER
