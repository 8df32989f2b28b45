"""Runs on imaginary ranks: what is built, what is left alone, and what is rejected."""

import pytest
import torch
import torch.distributed as dist
from tests.analysis.runs import LENGTH, MODEL, small_run
from tests.messages import raises
from torch._subclasses.fake_tensor import FakeTensor

from trainwright import RunConfig
from trainwright.analysis.fake_ranks import imaginary_ranks, imagine
from trainwright.errors import ConfigError
from trainwright.parallel.mesh import local

PARTS = '''
import torch
from trainwright import Trainer


class Reads(torch.nn.Module):
    """Reads values when it is made, and in its forward."""

    def __init__(self):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in rates)
        self.register_buffer("scale", torch.tensor(rates).numpy().sum() * torch.ones(4))

    def forward(self, features):
        for layer in self.layers:
            features = layer(features) * self.scale
        return features if features.sum().item() > -1 else -features


class Rows:
    def __len__(self):
        return 1000

    def __getitem__(self, place):
        assert type(torch.ones(1)) is torch.Tensor  # data is real
        return {"features": torch.ones(4) * place}


class Mine(Trainer):
    def forward(self, features):
        values = self.model(features)
        return values.square().mean(), {"largest": values.max().item()}
'''


@pytest.fixture
def project(in_tmp):
    (in_tmp / "parts.py").write_text(PARTS)
    settings = {
        "model": {"type": "parts.py:Reads"},
        "data": {"train": {"type": "parts.py:Rows"}},
        "trainer": {"type": "parts.py:Mine", "max_steps": 3, "global_batch_size": 64, "optimizer": {"type": "adamw"}},
        "runtime": {"mesh": {"fsdp": -1}},
    }
    return lambda **changes: RunConfig.from_dict({**settings, **changes}, project_dir=in_tmp)


def test_a_rank_of_a_thousand_holds_a_thousandth(in_tmp):
    with imagine(small_run({"fsdp": -1}), world_size=1024, rank=1, sequence_length=LENGTH) as run:
        parameters = dict(run.trainer.model.named_parameters())
        head = parameters["lm_head.weight"]
        assert head.shape == (96, 64)
        assert local(head).shape == (1, 64)
        assert all(isinstance(local(each), FakeTensor) for each in parameters.values())
        before = {name: local(each).shape for name, each in parameters.items()}
        run.step()
        assert all(each.grad is not None for each in parameters.values())
        assert {name: local(each.grad).shape for name, each in parameters.items()} == before
        assert run.batch_shapes() == {"input_ids": [2, LENGTH], "labels": [2, LENGTH]}
        assert run.whole.num_parameters == sum(each.numel() for each in parameters.values())
    assert not dist.is_initialized()
    assert list(in_tmp.iterdir()) == []


def test_values_that_a_model_reads_do_not_stop_it(project, in_tmp):
    with imagine(project(), world_size=8) as run:
        assert run.batch_shapes() == {"features": [8, 4]}
        run.step()
        assert all(each.grad is not None for each in run.trainer.model.parameters())
        assert all(isinstance(local(each), FakeTensor) for each in run.trainer.model.parameters())
    assert sorted(path.name for path in in_tmp.iterdir()) in (["parts.py"], ["__pycache__", "parts.py"])


def test_a_loop_that_reads_until_a_value_changes_ends(project, in_tmp):
    """Such as the one of torch's trunc_normal_, which draws again while some values are out of range."""
    (in_tmp / "parts.py").write_text(
        PARTS
        + """

class Draws(Reads):
    def __init__(self):
        super().__init__()
        torch.nn.init.trunc_normal_(self.layers[0].weight)
        while (torch.rand(4) > 0.5).any():
            pass
"""
    )
    with imagine(project(model={"type": "parts.py:Draws"}), world_size=2) as run:
        assert run.whole.num_parameters == 60


def test_the_error_of_a_model_that_cannot_be_built_is_raised(project):
    with (
        raises(ConfigError),
        imagine(project(model={"type": "parts.py:Reads", "width": 3}), world_size=8),
    ):
        pass
    assert not dist.is_initialized()


def test_two_micro_batches_represent_many():
    config = small_run({"fsdp": -1}, trainer__gradient_accumulation_steps=16)
    config = config.derive({"trainer.type": "language_model"})
    with imagine(config, world_size=4, sequence_length=LENGTH) as run:
        assert run.plan.gradient_accumulation_steps == 16
        assert run.batch["input_ids"].shape == (4, LENGTH)
        micro_batches = []
        inner = run.trainer.run_forward
        run.trainer.run_forward = lambda batch: (micro_batches.append(batch["input_ids"].shape), inner(batch))[1]
        run.step(1)
        run.step()
    assert micro_batches == [(2, LENGTH)] * 3


def test_models_take_the_forms_of_the_run_s_device():
    def saved_logits(device):
        config = small_run(runtime__device=device)
        with imagine(config, world_size=1, sequence_length=LENGTH) as run:
            seen = []
            run.trainer.model.lm_head.register_forward_hook(lambda *_: seen.append(1))
            head = run.trainer.model.lm_head
            head._forward_hooks.clear()
            inner = head.forward
            head.forward = lambda *inputs: (seen.append(1), inner(*inputs))[1]
            run.step()
            return len(seen)

    assert saved_logits("cpu") == 1
    assert saved_logits("cuda") == 0  # head and loss are one


def test_random_numbers_and_grad_mode_are_left_alone():
    torch.manual_seed(4711)
    state = torch.get_rng_state()
    with imagine(small_run(), world_size=2, sequence_length=LENGTH) as run:
        run.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert type(torch.zeros(1)) is torch.Tensor


@pytest.mark.parametrize("rank", [8, 9])
def test_a_rank_that_is_none_is_rejected(rank):
    with (
        raises(ConfigError, rank, "8"),
        imaginary_ranks({"fsdp": 8}, world_size=8, rank=rank),
    ):
        pass
    assert not dist.is_initialized()


def test_a_world_that_the_mesh_does_not_fit_is_rejected():
    with (
        raises(ConfigError, "4", "6", "tensor"),
        imagine(small_run({"fsdp": -1, "tensor": 4}), world_size=6, sequence_length=LENGTH),
    ):
        pass


def test_heads_that_the_tensor_axis_does_not_divide_are_rejected():
    config = small_run({"tensor": 8})
    with raises(ConfigError, "num_heads"), imagine(config, world_size=8, sequence_length=LENGTH):
        pass
    assert MODEL["num_heads"] == 4
