"""GRPO on two ranks, replicated and sharded: the completions, losses and weights of one process, also if resumed."""

import pytest
import torch
from tests.distributed.forked_launch import forget_groups, launch_well
from tests.trainers import grpo_runs
from tests.trainers import preference_runs as runs

from trainwright import RunConfig, build_trainer, load_checkpoint

LAYOUTS = {"replicate": "runtime.mesh={}", "fsdp": "runtime.mesh={fsdp: 2}"}
LORA = {"lora": {"match": "*_proj", "rank": 4}}
# The trainer, the model and the data of each case. A stop after the third step is between two updates that use the
# same completions if num_iterations is 2.
CASES = {
    "dapo": ({"scale_rewards": "batch", "mask_truncated_completions": True}, {}, {}),
    "grpo": ({"loss_type": "grpo", "num_iterations": 2, "beta": 0.1, "micro_batch_size": 1}, {}, {}),
    "adapters": ({"loss_type": "dr_grpo", "num_iterations": 2, "beta": 0.1}, LORA, {}),
    # 9 prompts in batches of 4: the last batch has one, and one rank none.
    "ragged": ({"num_iterations": 2, "beta": 0.1, "micro_batch_size": 1}, {}, {"last_batch": "short"}),
    "transformers": ({"importance_sampling_level": "sequence"}, {"type": "transformers:LlamaForCausalLM"}, {}),
}
STEPS = 6


def settings(folder, case):
    trainer, model, data = CASES[case]
    content = grpo_runs.with_evaluation(grpo_runs.settings(folder, **trainer, max_steps=STEPS))
    content["model"] |= model
    content["data"] |= data
    content["output_dir"] = str(folder / case / "runs")
    return content


def train(folder):
    for layout, override in LAYOUTS.items():
        for case in CASES:
            for steps in (3, STEPS):
                overrides = [override, f"name={layout}", f"trainer.max_steps={steps}"]
                build_trainer(RunConfig.load(folder / f"{case}.yaml", overrides)).train()
                forget_groups()
    # The first three updates here, the others in one process.
    build_trainer(RunConfig.load(folder / "grpo.yaml", ["name=moved", "trainer.max_steps=3"])).train()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grpo")
    grpo_runs.prepare(folder, number=9)
    for case in CASES:
        grpo_runs.write(folder, settings(folder, case), f"{case}.yaml")
        build_trainer(RunConfig.load(folder / f"{case}.yaml", ["name=one"])).train()
    launch_well(folder, 2, train)
    return folder


def assert_same_run(folder, case, name):
    expected, found = (runs.lines_of(folder / case, each) for each in ("one", name))
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    for line, one in zip(found, expected, strict=True):
        untimed = grpo_runs.untimed(one)
        assert {each: line[each] for each in untimed} == pytest.approx(untimed, rel=1e-4, abs=2e-5)
        assert line.get("completion") == one.get("completion")
    models = [load_checkpoint(folder / case / "runs" / each) for each in ("one", name)]
    for (parameter, first), (_, second) in zip(*(each.named_parameters() for each in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_evaluate_and_resume_as_one_process(folder, layout, case):
    assert_same_run(folder, case, layout)


def test_one_process_continues_the_completions_of_two_ranks(folder):
    build_trainer(RunConfig.load(folder / "grpo.yaml", ["name=moved"])).train()
    assert_same_run(folder, "grpo", "moved")
