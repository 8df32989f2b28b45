"""Compile mode on a GPU, with inductor: the course of eager mode, exact resumes, and a look that leaves no trace."""

import json

import pytest
import torch
from tests.faults.runs import config_of
from tests.loop.small_runs import at

from trainwright import build_trainer
from trainwright.trainers.language_model import LanguageModelTrainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = "vocab_size: 128, hidden_size: 64, num_heads: 2, intermediate_size: 128, max_positions: 64"
SETTINGS = (
    "data.eval={}",
    "evaluation={}",
    "data.train={type: tests.gpu.test_compile_cuda:Tokens}",
    "runtime.device=cuda",
    "runtime.precision=bf16",
    "log.every_steps=1",
)
COMPILED = "runtime.mode=compile"


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(0, 128, (64,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(folder, *overrides, more="dropout: 0.0", num_layers=2, hooks=()):
    class WithHooks(LanguageModelTrainer):
        @classmethod
        def build_hooks(cls, build):
            return [*super().build_hooks(build), *hooks]

    model = f"model={{type: llama, num_layers: {num_layers}, {SIZES}, {more}}}"
    return build_trainer(config_of(folder, *SETTINGS, model, *overrides), WithHooks)


def run(folder, *overrides, **rest):
    trainer = make(folder, *overrides, **rest)
    trainer.train()
    return trainer


def lines_of(trainer):
    return [json.loads(line) for line in (trainer.folder / "metrics.json").read_text().splitlines()]


def num_graphs(trainer):
    return sum(line.get("compile/graphs", 0) for line in lines_of(trainer))


@pytest.mark.parametrize(
    "more", ["dropout: 0.0", "compile_repeated_blocks: model.layers", "activation_checkpointing: DecoderLayer"]
)
def test_the_course_is_that_of_eager_mode(tmp_path, more):
    eager = run(tmp_path / "eager")
    compiled = run(tmp_path / "compiled", COMPILED, more=more)
    for one, other in zip(lines_of(eager), lines_of(compiled), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=5e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=5e-2)
    assert sum(line.get("compile/graph_breaks", 0) for line in lines_of(compiled)) == 0
    assert sum(line.get("compile/recompilations", 0) for line in lines_of(compiled)) == 0


def test_with_compile_repeated_blocks_a_deeper_model_takes_no_more_graphs(tmp_path):
    counts = []
    for depth in (2, 4):
        settings = (COMPILED, "trainer.max_steps=1")
        counts.append(
            num_graphs(
                run(tmp_path / f"of-{depth}", *settings, more="compile_repeated_blocks: model.layers", num_layers=depth)
            )
        )
        torch._dynamo.reset()
    assert counts[0] == counts[1]


@pytest.mark.parametrize("more", ["dropout: 0.2", "dropout: 0.2, compile_repeated_blocks: model.layers"])
def test_a_resumed_run_with_dropout_has_the_same_bits(tmp_path, more):
    settings = (COMPILED, "runtime.deterministic=true")
    whole = run(tmp_path / "whole", *settings, more=more)
    run(tmp_path / "cut", *settings, more=more, hooks=[at(3, lambda trainer: trainer.interrupt("a test"))])
    torch._dynamo.reset()
    resumed = run(tmp_path / "cut", *settings, more=more)
    torch.use_deterministic_algorithms(False)
    assert sum(line.get("compile/cache_hits", 0) for line in lines_of(resumed)) > 0  # it finds its kernels on the disk
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("mode", ["compile", "graph"])
def test_the_look_before_the_first_step_leaves_the_devices_generator(tmp_path, mode):
    trainer = make(tmp_path / "run", f"runtime.mode={mode}", more="dropout: 0.2")
    ids = torch.arange(64, device="cuda").repeat(8, 1)
    trainer.set_batch(None, 8)
    before = torch.cuda.get_rng_state()
    with trainer.storage:
        trainer._inspect_forward({"input_ids": ids, "labels": ids})
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
