"""fp8 on two ranks, replicated and sharded: the losses of one process, and exactly resumed."""

import pytest
import torch
from tests.build.test_fp8_runs import lines, load
from tests.distributed.forked_launch import forget_groups, launch_well

from trainwright import RunConfig, build_trainer
from trainwright.checkpoint.store import CheckpointStore
from trainwright.models.layers.fp8_linear import Fp8Linear

FP8 = ["runtime.precision=fp8", "runtime.fp8={match: '*_proj'}", "trainer.micro_batch_size=4"]
LAYOUTS = {
    "replicate": [],
    "fsdp, gathered in fp32": ["runtime.mesh={fsdp: 2}", "runtime.gather_precision=fp32"],
    "fsdp": ["runtime.mesh={fsdp: 2}"],
    "recomputed": [
        "runtime.mesh={fsdp: 2}",
        "runtime.gather_precision=fp32",
        "model.activation_checkpointing={layers: [DecoderLayer]}",
    ],
}


def train(folder):
    for layout, overrides in LAYOUTS.items():
        for steps in (2, 4):
            file = folder / layout / "run.yaml"
            trainer = build_trainer(RunConfig.load(file, [*FP8, *overrides, f"trainer.max_steps={steps}"]))
            assert sum(isinstance(layer, Fp8Linear) for layer in trainer.model.modules()) == 21
            trainer.train()
            forget_groups()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8")
    build_trainer(load(folder / "one")).train()
    for layout in LAYOUTS:
        load(folder / layout)  # writes run.yaml
    launch_well(folder, 2, train)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_and_resume_as_one_process(folder, layout):
    expected, found = lines(folder / "one"), lines(folder / layout)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    tolerance = 1e-2 if layout == "fsdp" else 1e-4  # which rounds weights to bf16 before fp8
    for first, second in zip(expected, found, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=tolerance)
    stores = [CheckpointStore(folder / name / "run" / "checkpoints") for name in ("one", layout)]
    one, two = (store.read(4, "model") for store in stores)
    assert one.keys() == two.keys()
    assert all(one[name].dtype == two[name].dtype == torch.float32 for name in one)
