"""examples/ports: each port and the loop that it replaces have the same losses on the same batches and weights."""

import copy
import importlib
import json
import shutil
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from trainwright import Hook, RunConfig, build_trainer

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


def run(*overrides):
    """Trains a port as its run.yaml says; returns the log lines and what was recorded."""
    settings = ["log.every_steps=1", "writers=[json]", "runtime.device=cpu", *overrides]
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
    settings = ("data.train.max_chunks=20", "trainer.max_epochs=6", "trainer.optimizer.lr=40")
    lines, recorder = run(*settings)
    words = importlib.import_module("words")
    valid_batches = DataLoader(words.Words(["shlex.py"], num_columns=10, length=35), batch_size=10)
    expected = list(original().train(recorder.model, by_epochs(recorder.batches(), 6, 20), valid_batches, lr=40))
    assert len({lr for _, lr in expected}) > 1  # the rate was reduced
    compare(lines, expected, "loss", "lr", rtol=1e-8)


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


@of("distillation")
def test_distillation(port):
    distill, recorder = importlib.import_module("distill"), Recorder()
    teacher = distill.classifier(32)
    settings = ["log.every_steps=1", "writers=[json]", "runtime.device=cpu"]
    trainer = distill.train_student(teacher, distill.classifier(8), hooks=[recorder], overrides=settings)
    expected = original().train(recorder.model, recorder.batches(), teacher)
    compare(lines_of(trainer), expected, "loss")
