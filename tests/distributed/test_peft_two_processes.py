"""Adapters of peft on two ranks, replicated and sharded: the losses of one process, and exactly resumed."""

import pytest
import torch
from tests.build.test_peft_runs import KINDS, LORA, base, lines, load, trained_names
from tests.distributed.forked_launch import forget_groups, launch_well

from trainwright import RunConfig, build_trainer, load_checkpoint
from trainwright.checkpoint.store import CheckpointStore

LAYOUTS = {"replicate": "runtime.mesh={}", "fsdp": "runtime.mesh={fsdp: 2}"}
ADAPTERS = {"lora": LORA, **{name: KINDS[name] for name in ("dora", "prompt_tuning", "modules_to_save")}}
AVERAGES = "hooks=[{type: ema}]"
CASES = [(layout, adapter) for layout in LAYOUTS for adapter in ADAPTERS]


def train(folder):
    for layout, adapter in CASES:
        for steps in (2, 4):
            file = folder / f"{layout}-{adapter}" / "run.yaml"
            build_trainer(RunConfig.load(file, [LAYOUTS[layout], AVERAGES, f"trainer.max_steps={steps}"])).train()
            forget_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peft")
    pretrained = base(folder / "base", num_key_value_heads=2)
    for adapter, settings in ADAPTERS.items():
        build_trainer(load(folder / f"one-{adapter}", pretrained, settings, AVERAGES)).train()
        for layout in LAYOUTS:
            load(folder / f"{layout}-{adapter}", pretrained, settings)  # writes run.yaml
    launch_well(folder, 2, train)
    return folder


@pytest.mark.parametrize(("layout", "adapter"), CASES)
def test_two_ranks_train_and_resume_as_one_process_and_save_the_adapter_alone(folder, layout, adapter):
    expected, found = (lines(folder / f"{each}-{adapter}") for each in ("one", layout))
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for first, second in zip(expected, found, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert second.get("valid/loss", 0.0) == pytest.approx(first.get("valid/loss", 0.0), rel=1e-5)
    models = [load_checkpoint(folder / f"{each}-{adapter}" / "run", weights="raw") for each in ("one", layout)]
    saved = CheckpointStore(folder / f"{layout}-{adapter}" / "run" / "checkpoints").read(4, "model")
    assert set(saved) == trained_names(models[0])
    for (name, first), (_, second) in zip(*(each.named_parameters() for each in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5, msg=name)
