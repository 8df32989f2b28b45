"""Trackers: lines reach a service once and in order, and whatever a service does, training continues."""

import logging
import math
import threading
import time

import pytest
import torch
from tests.faults.runs import train
from tests.messages import check_message
from tests.writers.services import KillAt, mlflow_lines, trackio_rows, wandb_lines
from tests.writers.test_writer import Drawing, make

from trainwright import EventStorage, RunConfig, Trainer
from trainwright.writers import tracker as trackers
from trainwright.writers.json_lines import JsonLinesWriter
from trainwright.writers.tracker import Tracker
from trainwright.writers.writer import RunInfo

BOTH = ("writers=[json]", "trainer.max_steps=3")


class Service:
    """What a service has; it survives the processes that send to it."""

    def __init__(self, last_step=0):
        self.last_step = last_step
        self.lines, self.uploads, self.ends = [], [], []

    def steps(self):
        return [line.step for line in self.lines]


class Sending(Tracker):
    """Sends to a `Service`, which fails in the given calls."""

    service = "relay"

    def __init__(self, service, *, fails=(), wait=None, **rest):
        super().__init__(**{"timeout_seconds": 20.0, **rest})
        self.receiver, self.fails, self.wait = service, fails, wait
        self.num_starts = 0

    def _fail_in(self, call):
        if call in self.fails:
            raise ConnectionError(f"{call} at https://me:hunter2@host/?token=abc failed\nwith details")

    def start(self, run):
        self.num_starts += 1
        self._fail_in("start")
        return self.receiver.last_step

    def send(self, line):
        if self.wait is not None:
            self.wait.wait(20)
        self._fail_in("send")
        self._fail_in(line.step)
        self.receiver.lines.append(line)
        self.receiver.last_step = line.step

    def upload(self, path, name):
        self._fail_in("upload")
        self.receiver.uploads.append((name, path.is_dir()))

    def finish(self, *, failed):
        self._fail_in("finish")
        self.receiver.ends.append(failed)


def log_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_service_gets_every_line_with_what_was_put(tmp_path):
    service = Service()
    make(tmp_path / "run", *BOTH, writers=[Sending(service)], hooks=[Drawing()]).train()
    assert service.steps() == [1, 2, 3]
    last = service.lines[-1]
    assert {"loss", "grad_norm", "lr"} <= last.numbers.keys()
    assert "step" not in last.numbers
    assert (list(last.media.images), list(last.media.histograms)) == (["pixels"], ["weights"])
    assert last.media.texts == {"note": "step 3"}
    assert service.ends == [False]


@pytest.mark.parametrize(
    ("fails", "steps", "ends"),
    [
        (("start",), [], []),
        (("send",), [], [False]),
        ((2,), [1, 3], [False]),
        (("finish",), [1, 2, 3], []),
        (("upload",), [1, 2, 3], [False]),
    ],
)
def test_a_service_that_fails_is_logged_without_credentials_and_training_continues(
    tmp_path, caplog, fails, steps, ends
):
    service = Service()
    writer = Sending(service, fails=fails, artifacts="config.yaml")
    with caplog.at_level(logging.WARNING, logger="trainwright"):
        trainer = make(tmp_path / "run", *BOTH, writers=[writer])
        trainer.train()
    assert trainer.step == 3
    assert (service.steps(), service.ends) == (steps, ends)
    (message,) = log_of(caplog)
    assert "hunter2" not in message
    assert "abc" not in message
    check_message(message, "relay", "ConnectionError")


def test_a_service_that_fails_a_thousand_times_is_logged_ten_times(tmp_path, caplog):
    writer, storage = Sending(Service(), fails=("send",)), EventStorage()
    writer.begin(RunInfo(RunConfig(), "run", "id", tmp_path, 0, is_resumed=False))
    for step in range(1, 1001):
        storage.step = step
        storage.publish({"loss": 1.0})
        writer.write(storage)
    writer.close()
    assert len(log_of(caplog)) == 10


def test_a_service_that_cannot_be_reached_at_first_gets_all_lines_later(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    service, has_started = Service(), threading.Event()

    class Late(Sending):
        def start(self, run):
            if self.num_starts < 3:
                self.fails = ("start",)
            else:
                self.fails = ()
                has_started.set()
            return super().start(run)

        def close(self):
            has_started.wait(20)
            super().close()

    make(tmp_path / "run", *BOTH, writers=[Late(service)]).train()
    assert service.steps() == [1, 2, 3]


def test_a_slow_service_neither_delays_steps_nor_keeps_the_process(tmp_path, caplog):
    never = threading.Event()
    writer = Sending(Service(), wait=never, timeout_seconds=0.05)
    trainer = make(tmp_path / "run", *BOTH, writers=[writer])
    trainer.train()  # would wait 60 seconds
    assert trainer.step == 3
    thread = next(each for each in threading.enumerate() if each.name == "writer-relay")
    assert thread.daemon
    never.set()
    thread.join(20)
    check_message(log_of(caplog)[-1], "relay", "0.05")


def info(folder):
    return RunInfo(RunConfig(), "run", "id", folder, 0, is_resumed=False)


def write_steps(writer, *steps):
    storage = EventStorage()
    for step in steps:
        storage.step = step
        storage.publish({"loss": 1.0})
        writer.write(storage)


def test_the_end_does_not_wait_for_lines_to_a_service_that_never_started(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 2)
    writer = Sending(Service(), fails=("start",))
    writer.begin(info(tmp_path))
    write_steps(writer, 1, 2, 3)  # the queue is full
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 10  # instead of 20


def test_a_thread_of_an_earlier_run_takes_no_lines_of_the_next(tmp_path):
    may_go, service = threading.Event(), Service()
    writer = Sending(service, wait=may_go, timeout_seconds=0.01)
    writer.begin(info(tmp_path))
    write_steps(writer, 1, 2)
    writer.close()  # gives up: its thread still waits in `send`
    earlier = next(each for each in threading.enumerate() if each.name == "writer-relay")
    writer.timeout_seconds = 20.0
    writer.begin(info(tmp_path))
    may_go.set()
    earlier.join(20)
    assert service.steps() == [1, 2]
    service.last_step = 0
    write_steps(writer, 3, 4)
    writer.close()
    assert service.steps() == [1, 2, 3, 4]
    assert service.ends == [False, False]


def test_lines_that_a_slow_service_cannot_take_are_dropped_with_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_WAITING", 4)
    may_go, service, storage = threading.Event(), Service(), EventStorage()
    writer = Sending(service, wait=may_go)
    writer.begin(RunInfo(RunConfig(), "run", "id", tmp_path, 0, is_resumed=False))
    for step in range(1, 21):
        storage.step = step
        storage.publish({"loss": 1.0})
        writer.write(storage)
    may_go.set()
    writer.close()
    assert service.steps() == sorted(service.steps())
    assert 4 <= len(service.lines) <= 5
    (message,) = log_of(caplog)
    check_message(message, "relay", "4", golden=False)


def test_images_that_wait_for_a_slow_service_are_bounded(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(trackers, "MAX_BYTES", 100)
    may_go, service, storage = threading.Event(), Service(), EventStorage()
    writer = Sending(service, wait=may_go)
    writer.begin(RunInfo(RunConfig(), "run", "id", tmp_path, 0, is_resumed=False))
    for step in range(1, 6):
        storage.step = step
        storage.put_image("a", torch.zeros(6, 6))
        storage.publish({"loss": 1.0}, media=storage.take_media())
        writer.write(storage)
    may_go.set()
    writer.close()
    assert service.steps() == [1, 2, 3, 4, 5]
    assert [list(line.media.images) for line in service.lines] == [["a"], ["a"], [], [], []]
    (message,) = log_of(caplog)
    check_message(message, "relay", "step 3")


@pytest.mark.parametrize("last_step", [0, 2, 4, 5, 6, 7, 20])
def test_a_resumed_run_sends_what_the_service_lacks_and_nothing_twice(tmp_path, last_step):
    make(tmp_path / "run", *BOTH, "trainer.max_steps=4").train()
    service = Service(last_step)
    make(tmp_path / "run", *BOTH, "trainer.max_steps=8", writers=[Sending(service)]).train()
    assert service.steps() == [step for step in range(1, 9) if step > last_step]
    if last_step == 0:
        alone = Service()
        make(tmp_path / "other", *BOTH, "trainer.max_steps=8", writers=[Sending(alone)]).train()
        losses = [[line.numbers["loss"] for line in each.lines] for each in (service, alone)]
        assert losses[0] == losses[1]


def test_without_metrics_json_only_new_lines_are_sent(tmp_path):
    make(tmp_path / "run", "writers=[]", "trainer.max_steps=4").train()
    service = Service()
    make(tmp_path / "run", "writers=[]", "trainer.max_steps=6", writers=[Sending(service)]).train()
    assert service.steps() == [5, 6]


def test_numbers_that_are_not_finite_are_sent_and_sent_again_as_nan(tmp_path):
    first, second, storage = Service(), Service(), EventStorage()
    json, run = JsonLinesWriter(tmp_path), RunInfo(RunConfig(), "run", "id", tmp_path, 1, is_resumed=True)
    storage.step = 1
    storage.publish({"loss": math.nan, "norm": math.inf, "tensor": torch.ones(2), "name": "text", "flag": True})
    json.write(storage)
    for service, lines in ((first, [storage]), (second, [])):
        writer = Sending(service)
        writer.begin(run)
        for line in lines:
            writer.write(line)
        writer.close()
    (_, sent), (again,) = first.lines, second.lines
    assert (sent.numbers["norm"], sent.numbers["flag"]) == (math.inf, True)
    assert [math.isnan(each.numbers["loss"]) for each in (sent, again)] == [True, True]
    assert math.isnan(again.numbers["norm"])
    assert sent.media.texts == again.media.texts == {"name": "text"}
    assert "tensor" not in sent.numbers


def test_an_error_of_the_run_is_told_and_one_before_the_run_is_not(tmp_path):
    class Failing(Trainer):
        def train_step(self, batch):
            if self.step == 2:
                raise ArithmeticError("no")
            return super().train_step(batch)

    service = Service()
    with pytest.raises(ArithmeticError):
        make(tmp_path / "failed", *BOTH, writers=[Sending(service)], trainer=Failing).train()
    assert (service.steps(), service.ends) == ([1, 2], [True])
    try:
        raise ValueError("another attempt")
    except ValueError:
        make(tmp_path / "run", *BOTH, writers=[Sending(service)]).train()
    assert service.ends == [True, False]


def test_artifacts_are_uploaded_at_the_end(tmp_path, caplog):
    service = Service()
    writer = Sending(service, artifacts=["config.yaml", "checkpoints/step-*3", "nothing-*"])
    make(tmp_path / "run", *BOTH, writers=[writer]).train()
    assert service.uploads == [("checkpoints/step-00000003", True), ("config.yaml", False)]
    check_message(log_of(caplog)[-1], "relay", "nothing-*")


def test_a_killed_run_continues_its_run_at_every_service_with_each_line_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    project = tmp_path.name
    services = f"wandb, {{type: mlflow, experiment: {project}}}, {{type: trackio, project: {project}}}"
    options = (f"writers=[json, {services}]", "log.every_steps=1", "checkpoint.every_steps=2")
    assert train(tmp_path / "run", *options, hooks=[KillAt(6, seconds=1.5)]) == -9
    client = mlflow.MlflowClient()
    assert [step for step, _ in mlflow_lines(client, project)] == [1, 2, 3, 4, 5]  # 5 is after the last checkpoint
    assert [step for _, step, _ in trackio_rows(project)] == [1, 2, 3, 4, 5]
    assert train(tmp_path / "run", *options) == 0
    assert train(tmp_path / "plain", "writers=[json]", "log.every_steps=1", "checkpoint.every_steps=2") == 0
    expected = [(line.step, line.numbers["loss"]) for line in trackers._written_lines(tmp_path / "plain/metrics.json")]
    assert [step for step, _ in expected] == [1, 2, 3, 4, 5, 6]
    assert mlflow_lines(client, project) == expected
    rows = trackio_rows(project)
    assert [(step, values["loss"]) for _, step, values in rows] == expected
    assert len({name for name, _, _ in rows}) == 1
    assert wandb_lines(tmp_path / "run") == expected
