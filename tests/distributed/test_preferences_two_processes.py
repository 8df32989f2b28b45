"""Preferences, reward models and distillation on two ranks, replicated and sharded: the numbers of one process."""

import pytest
import torch
import yaml
from tests.distributed.forked_launch import forget_groups, launch_well
from tests.references import preference_cases as cases
from tests.trainers import preference_runs as runs

from trainwright import RunConfig, build_trainer, load_checkpoint
from trainwright.errors import CheckpointError
from trainwright.trainers.reference_table import TABLE_FILE

LAYOUTS = {"replicate": "runtime.mesh={}", "fsdp": "runtime.mesh={fsdp: 2}"}
# The trainer, the model and the data of each case.
CASES = {
    "sigmoid": ({}, {}, {}),
    "sigmoid-lora": ({}, {"lora": {"match": "*_proj", "rank": 4}}, {}),
    "precomputed": ({"precompute_reference": True}, {}, {}),
    "sigmoid-shipped": ({}, {"type": "llama"}, {}),
    "orpo": ({"loss_type": "orpo"}, {}, {}),
    # The losses without a case above, with accumulation.
    "kto": ({"loss_type": "kto", "micro_batch_size": 1}, {}, {"train": {**runs.ROWS, "path": "singles.jsonl"}}),
    "ipo": ({"loss_type": "ipo", "micro_batch_size": 1, "optimizer": {"type": "sgd", "lr": 0.02}}, {}, {}),
    "hinge": ({"loss_type": "hinge", "micro_batch_size": 1}, {}, {}),
    "simpo": ({"loss_type": "simpo", "beta": 2.0, "micro_batch_size": 1}, {}, {}),
    "reward": runs.REWARD,
    "distill": runs.DISTILL,
}
FSDP_ONLY = ("ipo", "hinge", "simpo")
STEPS = 4
RUNS = [(layout, case) for layout in LAYOUTS for case in CASES if layout == "fsdp" or case not in FSDP_ONLY]


# kto pairs the prompts and answers of a rank, so the run of one process pairs those of each half of its batch.
HALVES = """
from trainwright.data.collators.preferences import Preferences


class Halves(Preferences):
    def _collate_unpaired(self, prompts, columns, advice):
        answers, half = columns["completion"], len(prompts) // 2
        others = [answers[half - 1], *answers[: half - 1], answers[-1], *answers[half:-1]]
        paired = self._pad(prompts, others, columns["max_length"])
        batch = super()._collate_unpaired(prompts, columns, advice)
        return {**batch, **{f"kl_{name}": each for name, each in paired.items()}}
"""


def settings(folder, case):
    content = runs.settings_of(folder, *CASES[case], steps=STEPS)
    content["data"]["eval"] = {"valid": dict(content["data"]["train"])}
    content["evaluation"] = {"batch_size": 10}
    content["output_dir"] = str(folder / case / "runs")
    return content


def train(folder):
    for layout, case in RUNS:
        for steps in (2, STEPS):
            overrides = [LAYOUTS[layout], f"name={layout}", f"trainer.max_steps={steps}"]
            build_trainer(RunConfig.load(folder / f"{case}.yaml", overrides)).train()
            forget_groups()
    reject_damaged_table(folder)


def reject_damaged_table(folder):
    """Every rank raises, also one that does not read the table."""
    name = [LAYOUTS["replicate"], "name=replicate", f"trainer.max_steps={STEPS + 1}"]
    trainer = build_trainer(RunConfig.load(folder / "precomputed.yaml", name))
    (trainer.folder / TABLE_FILE).write_bytes(b"damaged")
    trainer.barrier()
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.train()
    forget_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    runs.prepare(folder)
    (folder / "halves.py").write_text(HALVES)
    cases.write_rows(folder / "singles.jsonl", cases.make_rows(paired=False))
    for case in CASES:
        (folder / f"{case}.yaml").write_text(yaml.safe_dump(settings(folder, case)))
        overrides = ["name=one", *(["data.collator.type=halves.py:Halves"] if case == "kto" else [])]
        build_trainer(RunConfig.load(folder / f"{case}.yaml", overrides)).train()
    launch_well(folder, 2, train)
    return folder


@pytest.mark.parametrize(("layout", "case"), RUNS)
def test_two_ranks_train_evaluate_and_resume_as_one_process(folder, layout, case):
    expected, found = (runs.lines_of(folder / case, name) for name in ("one", layout))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, one in zip(found, expected, strict=True):
        untimed = {name: value for name, value in one.items() if not name.endswith(runs.TIMED)}
        if case == "precomputed" and one["step"] == 1:
            del untimed["rewards/accuracies"]  # the model is the reference: the signs of the rewards are rounding
        assert {name: line[name] for name in untimed} == pytest.approx(untimed, rel=2e-5, abs=3e-5)
    models = [load_checkpoint(folder / case / "runs" / name) for name in ("one", layout)]
    for (name, first), (_, second) in zip(*(each.named_parameters() for each in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5, msg=name)
