"""Preferences, reward models and distillation on two ranks, replicated and sharded: the numbers of one process."""

import pytest
import torch
import yaml
from tests.distributed.forked_launch import forget_groups, launch_well
from tests.trainers import preference_runs as runs

from trainwright import RunConfig, build_trainer, load_checkpoint
from trainwright.errors import CheckpointError
from trainwright.trainers.reference_table import TABLE_FILE

LAYOUTS = {"replicate": "runtime.mesh={}", "fsdp": "runtime.mesh={fsdp: 2}"}
REWARD_HEAD = {"lm_head": {"type": "torch.nn:Linear", "in_features": 32, "out_features": 1, "bias": False}}
TEXTS = {
    "train": {"type": "json_lines", "path": "rows.jsonl"},
    "collator": {
        "type": "tokenize",
        "tokenizer": "base",
        "prompt": "prompt",
        "completion": "chosen",
        "drop": ["rejected"],
    },
    "shuffle": False,
}
SMALL = {"type": "llama", "vocab_size": 32, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "pretrained": None}
TEACHER = {"type": "transformers:LlamaForCausalLM", "pretrained": "base"}
# The trainer, the model and the data of each case.
CASES = {
    "sigmoid": ({}, {}, {}),
    "sigmoid-lora": ({}, {"lora": {"match": "*_proj", "rank": 4}}, {}),
    "precomputed": ({"precompute_reference": True}, {}, {}),
    "sigmoid-shipped": ({}, {"type": "llama"}, {}),
    "orpo": ({"loss_type": "orpo"}, {}, {}),
    "reward": ({"type": "reward"}, {"type": "llama", "replace": REWARD_HEAD}, {}),
    "distill": ({"type": "distill", "teacher": TEACHER, "alpha": 0.7}, SMALL, TEXTS),
}
STEPS = 4


def settings(folder, case):
    trainer, model, data = CASES[case]
    content = runs.settings(folder, steps=STEPS)
    content["model"] |= model
    content["data"] |= data
    content["trainer"] |= trainer
    if "type" in trainer:
        del content["trainer"]["loss_type"]
    content["data"]["eval"] = {"valid": dict(content["data"]["train"])}
    content["evaluation"] = {"batch_size": 10}
    content["output_dir"] = str(folder / case / "runs")
    return content


def train(folder):
    for layout, override in LAYOUTS.items():
        for case in CASES:
            for steps in (2, STEPS):
                name = [f"name={layout}", f"trainer.max_steps={steps}"]
                build_trainer(RunConfig.load(folder / f"{case}.yaml", [override, *name])).train()
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
    for case in CASES:
        (folder / f"{case}.yaml").write_text(yaml.safe_dump(settings(folder, case)))
        build_trainer(RunConfig.load(folder / f"{case}.yaml", ["name=one"])).train()
    launch_well(folder, 2, train)
    return folder


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
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
