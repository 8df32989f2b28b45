"""Quantized bases on two replicas: the losses of one process, and exactly resumed."""

import pytest
import torch
from tests.build.test_quantize_runs import NF4, bits_of, lines, load, train
from tests.distributed.forked_launch import forget_groups, launch_well

from trainwright import RunConfig, load_checkpoint
from trainwright.models.layers.quantized_linear import quantized_layers


def act(folder):
    for steps in (2, 4):
        config = RunConfig.load(folder / "two.yaml", [f"trainer.max_steps={steps}"])
        trainer = train(config)
        assert trainer.ranks.size == 2
        assert len(dict(quantized_layers(trainer.model))) == 21
        forget_groups()


def test_two_replicas_train_and_resume_as_one_process(tmp_path):
    train(load(tmp_path / "one", NF4))
    load(tmp_path / "two", NF4).save(tmp_path / "two.yaml")
    launch_well(tmp_path, 2, act)
    expected, found = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    for first, second in zip(expected, found, strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=1e-5)
    models = [bits_of(load_checkpoint(tmp_path / name / "run")) for name in ("one", "two")]
    for name, first in models[0].items():
        if first.is_floating_point():
            torch.testing.assert_close(models[1][name], first, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(models[1][name], first), name
