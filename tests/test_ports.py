"""examples/ports: each port and the loop that it replaces have the same losses on the same batches and weights."""

import copy
import importlib
import json
import os
import runpy
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from tests.vision import import_timm
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from trainwright import Hook, RunConfig, build_trainer
from trainwright.analysis.check import check_run

PORTS = Path(__file__).parents[1] / "examples" / "ports"
STEPS = "trainer.max_steps=120"


class Recorder(Hook):
    """Copies the model, and what every step begins with: the state of torch's generator, and the batch."""

    def before_train(self):
        self.record(self.trainer)

    def record(self, trainer):
        self.model, self.steps = copy.deepcopy(trainer.model), []
        fetch = trainer.next_train_inputs

        def recording(iterator):
            state, batch = torch.get_rng_state(), fetch(iterator)
            self.steps.append((state, tree_map_only(torch.Tensor, lambda one: one.detach().clone(), batch)))
            return batch

        trainer.next_train_inputs = recording

    def batches(self):
        """Yields the batches; what a loop draws after each is what the run drew."""
        for state, batch in self.steps:
            torch.set_rng_state(state)
            yield batch


@pytest.fixture
def port(request, tmp_path, monkeypatch):
    """A copy of the folder of a port, which is the current one; its modules can be imported."""
    folder = shutil.copytree(PORTS / request.param, tmp_path / request.param, ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    state, before = torch.get_rng_state(), set(sys.modules)
    yield folder
    torch.set_rng_state(state)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is not None and Path(file).is_relative_to(folder):
            del sys.modules[name]


@pytest.fixture
def double_precision():
    """For a loop with so high a rate that it amplifies the rounding of single precision."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def of(name):
    return pytest.mark.parametrize("port", [name], indirect=True)


def run(*overrides, writers=("writers=[json]",)):
    """Trains a port as its run.yaml says; returns the log lines and what was recorded."""
    settings = ["log.every_steps=1", "runtime.device=cpu", *writers, *overrides]
    trainer, recorder = build_trainer(RunConfig.load("run.yaml", settings)), Recorder()
    recorder.record(trainer)
    trainer.train()
    return lines_of(trainer), recorder


def lines_of(trainer):
    lines = [json.loads(line) for line in (trainer.folder / "metrics.json").read_text("utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def original():
    return importlib.import_module("original")


def compare(lines, expected, *names, rtol=1e-5):
    """Compares values of the log lines with those of the original, a number or a tuple for each step."""
    rows = [[line[name] for name in names] for line in lines]
    expected = [list(each) if isinstance(each, tuple) else [each] for each in expected]
    assert len(rows) == len(expected) >= 100
    assert len({row[0] for row in rows}) > 90  # something is learned
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), rtol=rtol, atol=1e-6)


def by_epochs(batches, num_epochs, num_batches):
    """Yields an iterator over the batches of each epoch; the one before must be exhausted."""
    for _ in range(num_epochs):
        yield islice(batches, num_batches)


def pairs(recorder):
    """Yields the recorded batches as a DataLoader returns pairs."""
    return (tuple(batch.values()) for batch in recorder.batches())


@of("mnist")
def test_mnist(port):
    lines, recorder = run("trainer.max_epochs=5")
    assert [len(batch["labels"]) for _, batch in recorder.steps[:24]] == [64] * 23 + [28]
    compare(lines, original().train(recorder.model, by_epochs(pairs(recorder), 5, 24)), "loss", "lr")


@of("dcgan")
def test_dcgan(port):
    lines, recorder = run("trainer.max_epochs=5")
    compare(lines, original().train(recorder.model, recorder.batches()), "loss", "discriminator_loss")


@of("word_language_model")
def test_word_language_model(port, double_precision):
    """Over epochs, with the hidden state of training carried across evaluations and dropped between epochs."""
    lines, recorder = run(
        "model.width=32", "data.train.max_chunks=20", "trainer.max_epochs=6", "trainer.optimizer.lr=40"
    )
    words = importlib.import_module("words")
    valid_batches = DataLoader(words.Words(["shlex.py"], num_columns=10, length=35), batch_size=10)
    expected = list(original().train(recorder.model, by_epochs(recorder.batches(), 6, 20), valid_batches, lr=40))
    assert len({lr for _, lr in expected}) > 1  # the rate was reduced
    compare(lines, expected, "loss", "lr", rtol=1e-8)


@of("timm_imagefolder")
def test_timm_imagefolder(port):
    import_timm()  # tests/test_integrations.py runs this test with it
    runpy.run_path("make_images.py", run_name="__main__")
    assert not [str(each) for each in check_run("run.yaml").findings if each.severity == "error"]
    lines, recorder = run("trainer.max_steps=100", "trainer.global_batch_size=8")
    counts = torch.cat([batch["labels"] for _, batch in recorder.steps]).bincount()
    assert counts.max() < 2 * counts.min()  # of the images, ten times as many are 0 as 9
    compare(lines, original().train(recorder.model, pairs(recorder), num_steps=100), "loss", "lr")


@of("kfold")
def test_kfold(port):
    for fold in (0, 3):
        lines, recorder = run(f"data.train.fold={fold}", "trainer.max_epochs=10")
        compare(lines, original().train(recorder.model, pairs(recorder)), "loss")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["fold-0", "fold-3"]


@of("vae")
def test_vae(port):
    lines, recorder = run(STEPS)
    compare(lines, original().train(recorder.model, recorder.batches()), "loss")


@of("reinforce")
def test_reinforce(port):
    lines, recorder = run("trainer.max_steps=100", "trainer.max_moves=12")
    expected = original().train(recorder.model, recorder.batches(), max_moves=12)
    compare(lines, expected, "loss", "running_reward")


@of("contrastive")
def test_contrastive(port):
    lines, recorder = run(STEPS)
    compare(lines, original().train(recorder.model, recorder.batches(), num_steps=120), "loss", "lr")


@of("every_extra")
def test_every_extra(port, monkeypatch, request):
    for name in ("transformers", "datasets", "peft", "schedulefree", "torchmetrics", "wandb", "mlflow", "trackio"):
        pytest.importorskip(name)
    # Its service would be inherited, without its threads, by processes that later tests fork.
    request.addfinalizer(lambda: importlib.import_module("wandb").teardown())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{port}/mlruns")
    runpy.run_path("prepare.py", run_name="__main__")
    lines, recorder = run("trainer.max_steps=100", writers=())
    _, valid_batches = original().load_data()
    compare(lines, original().train(recorder.model, recorder.batches(), valid_batches), "loss")
    auroc = original().evaluate(recorder.model, valid_batches)  # with the averaged weights of the optimizer
    assert lines[-1]["valid/auroc"] == pytest.approx(auroc, abs=1e-4)
    written = {path.name for path in (port / "runs" / "every-extra").iterdir()}
    assert {"metrics.csv", "tensorboard", "wandb"} <= written
    assert (Path(os.environ["TRACKIO_DIR"]) / "ports.db").is_file()
    assert list(port.glob("mlruns/*/*/metrics/loss"))


@of("distillation")
def test_distillation(port):
    distill, recorder = importlib.import_module("distill"), Recorder()
    teacher = distill.classifier(32)
    settings = ["log.every_steps=1", "writers=[json]", "runtime.device=cpu"]
    trainer = distill.train_student(teacher, distill.classifier(8), hooks=[recorder], overrides=settings)
    expected = original().train(recorder.model, recorder.batches(), teacher)
    compare(lines_of(trainer), expected, "loss")


@pytest.mark.parametrize("port", ["contrastive", "dcgan", "reinforce", "word_language_model"], indirect=True)
def test_an_interrupted_port_continues_with_the_same_losses(port):
    settings = ["trainer.max_steps=8", "log.every_steps=1", "writers=[json]", "runtime.device=cpu"]
    losses = {}
    for name, parts in (("whole", [None]), ("interrupted", [3, None])):
        for interrupted_at in parts:
            trainer = build_trainer(RunConfig.load("run.yaml", [*settings, f"name={name}"]))
            interrupt_at(trainer, interrupted_at)
            trainer.train()
            assert trainer.step == (interrupted_at or 8)
        losses[name] = [line["loss"] for line in lines_of(trainer)]
    assert len(losses["whole"]) == 8
    assert losses["whole"] == losses["interrupted"]


def interrupt_at(trainer, step):
    """Interrupts a run at the end of a step, as a signal would."""
    fetch = trainer.next_train_inputs

    def fetching(iterator):
        if trainer.step + 1 == step:
            trainer.interrupt("a test")
        return fetch(iterator)

    trainer.next_train_inputs = fetching


CHECKED = ["contrastive", "dcgan", "kfold", "mnist", "reinforce", "vae", "word_language_model"]


@pytest.mark.parametrize("port", CHECKED, indirect=True)
def test_check_finds_no_error(port):
    assert not [str(each) for each in check_run("run.yaml").findings if each.severity == "error"]


def test_a_port_is_short_and_in_the_table():
    table = (PORTS / "README.md").read_text("utf-8")
    folders = [each for each in PORTS.iterdir() if each.is_dir() and any(each.glob("*.py"))]
    assert len(folders) == 10
    for folder in folders:
        files = [path for suffix in ("*.py", "*.yaml") for path in folder.glob(suffix) if path.name != "original.py"]
        assert sum(bool(line.strip()) for path in files for line in path.read_text("utf-8").splitlines()) < 100
        assert f"| [{folder.name}]({folder.name}) |" in table
