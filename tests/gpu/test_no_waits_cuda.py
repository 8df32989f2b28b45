"""No step waits for the device between two log steps: not the feed, the update, the hooks, nor the loop itself."""

import json
from pathlib import Path

import pytest
import torch

from trainwright import Hook, RunConfig, Trainer, build_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROJECT = Path(__file__).parents[1] / "project"

WARM_UP = 24
"""Steps before anything is watched: kernels are compiled, the update is recorded, memory is pinned."""


@pytest.fixture(autouse=True)
def _waits_are_allowed_again():
    yield
    torch.cuda.set_sync_debug_mode(0)


class NoWaits(Hook):
    """Makes torch raise on whatever the host waits for, from a step's beginning until the next log step's end of hooks.

    It is the last hook, so that everything else of `after_step` is watched, and after a step that is not logged the
    whole way to the next one: the vote, the step's end, rates, seeds, the batch.
    """

    def __init__(self):
        self.num_watched = 0

    def before_step(self):
        if self.trainer.step >= WARM_UP:
            torch.cuda.set_sync_debug_mode("error")

    def after_step(self):
        self.num_watched += torch.cuda.get_sync_debug_mode() == 2
        if self.trainer.step % self.trainer.config.log.every_steps == 0 or self.trainer.is_last_step:
            torch.cuda.set_sync_debug_mode(0)

    def close(self):
        torch.cuda.set_sync_debug_mode(0)


def watched(config, trainer_class=Trainer):
    hook = NoWaits()

    class Watched(trainer_class):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), hook]

    trainer = build_trainer(config, Watched)
    trainer.train()
    return trainer, hook


def load(tmp_path, *overrides):
    plain = ("data.eval={}", "evaluation={}", "checkpoint.every_steps=null", "trainer.max_steps=124")
    settings = (f"output_dir={tmp_path}", "runtime.device=cuda", "log.every_steps=25", "data.train.size=992")
    return RunConfig.load(PROJECT / "run.yaml", [*settings, *plain, *overrides])


def write_rows(tmp_path):
    """Writes tokens.py with a dataset of rows of 64 tokens."""
    (tmp_path / "tokens.py").write_text(
        "import torch\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    tokens_per_sample = 64\n"
        "    def __len__(self): return 992\n"
        "    def __getitem__(self, i):\n"
        "        row = (torch.arange(64) * (i % 7 + 1)) % 128\n"
        "        return {'input_ids': row, 'labels': row}\n"
    )


@pytest.mark.parametrize(
    ("mode", "precision", "workers"),
    [
        ("eager", "fp32", 0),
        ("eager", "bf16", 2),
        ("compile", "bf16", 0),
        ("graph", "fp32", 0),
        ("graph", "bf16", 2),
    ],
)
def test_a_hundred_steps_wait_for_nothing_between_log_steps(tmp_path, mode, precision, workers):
    config = load(tmp_path, f"runtime.mode={mode}", f"runtime.precision={precision}", f"data.num_workers={workers}")
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)
    lines = [json.loads(line) for line in (tmp_path / "small" / "metrics.json").read_text().splitlines()]
    assert [line["step"] for line in lines] == [25, 50, 75, 100, 124]
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_a_language_model_waits_for_nothing_either(tmp_path, mode):
    write_rows(tmp_path)
    llama = (
        "{type: llama, vocab_size: 128, hidden_size: 64, intermediate_size: 128, num_layers: 2, "
        "num_heads: 4, num_kv_heads: 2, max_positions: 64}"
    )
    config = load(
        tmp_path,
        *(f"runtime.mode={mode}", "runtime.precision=bf16", f"data.train={{type: {tmp_path}/tokens.py:Rows}}"),
        *(f"model={llama}", "trainer.type=language_model", "anomalies={non_finite: skip, spike: skip}"),
    )
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_our_optimizers_wait_for_nothing(tmp_path, optimizer, mode):
    config = load(
        tmp_path,
        *(f"runtime.mode={mode}", f"trainer.optimizer={{type: {optimizer}, lr: 1e-3}}"),
        *("anomalies={non_finite: skip}", "hooks=[{type: ema}, {type: count_progress}]"),
    )
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)


@pytest.mark.parametrize("mode", ["eager", "compile", "graph"])
def test_images_histograms_and_texts_of_a_model_wait_for_nothing(tmp_path, mode):
    config = load(tmp_path, f"runtime.mode={mode}", "model.type=tests.writers.test_writer:Putting")
    trainer, hook = watched(config)
    assert (trainer.step, hook.num_watched) == (124, 100)
    assert trainer.storage.histograms["logits"].num_values == 16  # of the last step
    assert list(trainer.storage.images) == ["logits"]


def test_a_wait_would_be_noticed(tmp_path):
    class Reading(Trainer):
        def forward(self, **batch):
            outputs = super().forward(**batch)
            if self.step == 40:
                outputs["loss"].item()
            return outputs

    with pytest.raises(RuntimeError, match="synchroniz"):
        watched(load(tmp_path), Reading)
