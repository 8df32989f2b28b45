"""Benchmarks on two ranks, replicated and sharded: the values, samples and losses of one process."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from tests.benchmarks.quiz import build, math_of, write_quiz
from tests.distributed.forked_launch import forget_groups, launch_well

from trainwright.errors import ConfigError, TrainwrightError

LAYOUTS = ("replicate", "fsdp", "tensor", "context")
OPTIONS = (
    "trainer.max_steps=12",
    "evaluation.every_steps=6",
    "log.every_steps=1",
    "evaluation.benchmarks.0.batch_size=3",
    "evaluation.benchmarks.1.batch_size=2",  # 4 batches, so that one of two ranks has none at the end
)

BROKEN = """
from trainwright import Benchmark
import torch.distributed as dist


class Broken(Benchmark):
    metrics = {"acc": "max"}

    def load(self):
        return [1, 2]

    def run_batch(self, model, samples, all_agree):
        raise RuntimeError("this question is broken")
"""


def results(trainer):
    """The values and the samples of both benchmarks, by step."""
    found = {}
    for step in ("step-00000006", "step-00000012"):
        folder = trainer.folder / "benchmarks" / step
        for name in ("quiz", "cities"):
            found[f"{step} {name}"] = list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
        found[step] = json.loads((folder / "results.json").read_text())
    return found


def act(folder):
    for layout in LAYOUTS:
        trainer = build(folder, f"name={layout}", f"runtime.mesh={{{layout}: 2}}", *OPTIONS)
        logs = trainer.train()
        assert dist.get_rank() or trainer.benchmark_results
        (folder / f"{layout}-{dist.get_rank()}.json").write_text(json.dumps(logs))
        forget_groups()
    # All ranks fail together, and none waits for another.
    for layout in ("replicate", "fsdp"):
        broken = "evaluation.benchmarks=[{type: broken.py:Broken, batch_size: 1}]"
        with pytest.raises((TrainwrightError, RuntimeError), match="this question is broken"):
            build(folder, f"name=broken-{layout}", f"runtime.mesh={{{layout}: 2}}", broken).train()
        forget_groups()
    with pytest.raises(ConfigError, match="pipeline"):
        build(folder, "name=stages", "runtime.mesh={pipeline: 2}", "trainer.micro_batch_size=4")


def test_two_ranks_have_the_results_of_one_process(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    write_quiz(tmp_path)
    alone = build(tmp_path, "name=alone", *OPTIONS)
    logs = alone.train()
    expected = results(alone)
    assert 0 < logs["quiz/acc"] <= 1
    launch_well(tmp_path, 2, act)
    for layout in LAYOUTS:
        assert json.loads((tmp_path / f"{layout}-0.json").read_text()) == logs
        assert json.loads((tmp_path / f"{layout}-1.json").read_text()) == logs
        trainer = type("Run", (), {"folder": tmp_path / "runs" / layout})
        found = results(trainer)
        for key, rows in expected.items():
            assert len(found[key]) == len(rows)
            for one, other in zip(rows, found[key], strict=True):
                if "log_likelihoods" in one:
                    likelihoods = other.pop("log_likelihoods")
                    assert likelihoods == pytest.approx(one["log_likelihoods"], abs=1e-3), layout
                    one = {name: value for name, value in one.items() if name != "log_likelihoods"}
                assert one == other
        assert math_of(trainer).keys() == math_of(alone).keys()
