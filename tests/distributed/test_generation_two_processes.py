"""Samples of sharded weights: each rank has prompts of its own, and all call the model equally often."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from tests.distributed.forked_launch import launch_well
from tests.export.runs import RUN, TEXT

from trainwright import RunConfig, build_trainer
from trainwright.errors import ConfigError
from trainwright.models.decoding import StaticReader
from trainwright.models.generation import sample_completions

PROMPTS = [[[100, 101, 102], [10], [40, 41]], [[97, 32, 61], [9, 8, 7, 6]]]  # of each rank
LAYOUTS = {name: f"runtime.mesh={{{name}: 2}}" for name in ("replicate", "fsdp", "tensor", "context")}


def prompts_of(layout, rank):
    """Ranks that compute together have the same prompts."""
    return rank if layout in ("replicate", "fsdp") else 0


def all_stopped(here):
    votes = torch.tensor([int(here)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes)


def sample(trainer, rank, **options):
    made = sample_completions(
        trainer.model,
        PROMPTS[rank],
        seeds=[7 + rank, 8, 9][: len(PROMPTS[rank])],
        max_new_tokens=12,
        stop_ids=range(100),
        num_return_sequences=2,
        log_probabilities=True,
        **options,
    )
    return {"rows": made.rows(), "log_probabilities": made.log_probabilities.tolist()}


def build(folder, *overrides):
    trainer = build_trainer(
        RunConfig.load(folder / "run.yaml", [f"output_dir={folder / 'runs'}", "writers=[]", *overrides])
    )
    trainer.train()
    trainer.model.train()
    return trainer


def act(folder):
    for name, layout in LAYOUTS.items():
        trainer = build(folder, layout, f"name={name}")
        rank = dist.get_rank()
        made = sample(trainer, prompts_of(name, rank), all_stopped=all_stopped)
        assert trainer.model.training
        (folder / f"{name}-{rank}.json").write_text(json.dumps(made))
        if name in ("fsdp", "tensor"):
            with pytest.raises(ConfigError, match="sharded"):
                sample(trainer, rank, reader=StaticReader(trainer.model, compiler=None))


def test_each_rank_has_the_samples_of_a_single_process(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "run.yaml").write_text(RUN)
    alone = build(tmp_path, "name=alone")
    expected = [sample(alone, rank) for rank in range(2)]
    lengths = {len(row) for each in expected for row in each["rows"]}
    assert len(lengths) > 1  # some stop earlier than others
    launch_well(tmp_path, 2, act)
    for name in LAYOUTS:
        for rank in range(2):
            found = json.loads((tmp_path / f"{name}-{rank}.json").read_text())
            known = expected[prompts_of(name, rank)]
            assert found["rows"] == known["rows"], name
            for row, other in zip(found["log_probabilities"], known["log_probabilities"], strict=True):
                assert row == pytest.approx(other, abs=1e-4)
