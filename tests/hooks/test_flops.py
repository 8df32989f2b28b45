"""The operations of a step, and the rate of matrix products."""

import random

import pytest
import torch
from tests.loop.small_runs import PLAIN, Replacing, make
from tests.project.parts import Net
from torch import nn

from trainwright import Trainer, get_event_storage
from trainwright.hooks.flops import (
    KNOWN_PEAKS,
    TensorLike,
    can_count_aside,
    count_aside,
    estimate_flops,
    flop_counter,
    known_peak,
    measure_matrix_rate,
)

BATCH = {"x": TensorLike(torch.Size([8, 4]), torch.float32), "labels": TensorLike(torch.Size([8]), torch.int64)}

# 8 samples: two products forward; backward one for each weight, and one for the input of the second layer.
FORWARD = 2 * 8 * (4 * 8 + 8 * 2)
EXPECTED = FORWARD + FORWARD + 2 * 8 * 8 * 2


def build(tmp_path, *overrides, net=Net, **rest):
    class WithNet(Trainer):
        @classmethod
        def build_model(cls, build):
            build.model()
            return net()

    return make(tmp_path / "run", *PLAIN, "model.type=parts.py:Net", *overrides, trainer=WithNet, **rest)


def everything(trainer):
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return state, [id(each) for each in trainer.model.parameters()], torch.get_rng_state(), random.getstate()


def assert_equal(before, after):
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    assert before[3] == after[3]


@pytest.mark.parametrize("micro_batch_size", [8, 4])
def test_a_step_is_counted_outside_the_run_as_inside_it(tmp_path, micro_batch_size):
    trainer = build(tmp_path, f"trainer.micro_batch_size={micro_batch_size}")
    trainer.set_batch(None, 8)
    assert count_aside(trainer, BATCH) == EXPECTED
    assert trainer.batch.num_samples == 8
    with flop_counter() as counter:
        batch = {"x": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.long)}
        for micro_batch in trainer.micro_batches(batch):
            trainer.run_forward(micro_batch).loss.backward()
    assert counter.get_total_flops() == EXPECTED


def test_counting_changes_no_state(tmp_path):
    class Busy(Replacing):
        def forward(self, x, labels=None):
            random.random()
            torch.rand(3)
            get_event_storage().put_scalar("noise", x.mean())
            return super().forward(x, labels)

    trainer = build(tmp_path, net=Busy)
    trainer.set_batch(None, 8)
    before = everything(trainer)
    with trainer.storage:
        assert count_aside(trainer, BATCH) == EXPECTED
        assert trainer.storage.latest() == {}
    assert_equal(before, everything(trainer))
    assert all(each.grad is None for each in trainer.model.parameters())


def test_a_forward_that_reads_values_cannot_be_counted(tmp_path, caplog):
    class Reading(Net):
        def forward(self, x, labels=None):
            return super().forward(x if x.sum().item() > 0 else -x, labels)

    trainer = build(tmp_path, net=Reading)
    trainer.set_batch(None, 8)
    before = everything(trainer)
    with caplog.at_level("INFO"):
        assert count_aside(trainer, BATCH) is None
    assert "could not be counted" in caplog.text
    assert_equal(before, everything(trainer))


def test_tied_weights_stay_tied(tmp_path):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(4, 8)
            self.again.weight = self.layers[0].weight

        def forward(self, x, labels=None):
            return super().forward(x + self.again(x)[:, :4], labels)

    trainer = build(tmp_path, net=Tied)
    trainer.set_batch(None, 8)
    assert count_aside(trainer, BATCH) > EXPECTED
    assert trainer.model.again.weight is trainer.model.layers[0].weight


def test_a_user_s_own_step_is_not_counted_outside_the_run(tmp_path):
    class Own(Trainer):
        def train_step(self, batch):
            return super().train_step(batch)

    assert can_count_aside(make(tmp_path / "one", *PLAIN))
    assert not can_count_aside(make(tmp_path / "two", *PLAIN, trainer=Own))


@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_attention_counts_by_its_query_heads(num_key_heads):
    queries = torch.zeros(1, 4, 64, 16, requires_grad=True)
    keys, values = (torch.zeros(1, num_key_heads, 64, 16, requires_grad=True) for _ in range(2))
    product = 2 * 4 * (64 * 64 * 16)
    with flop_counter() as counter:
        attend = nn.functional.scaled_dot_product_attention
        attend(queries, keys, values, enable_gqa=num_key_heads < 4).sum().backward()
    assert counter.get_total_flops() == (2 + 5) * product


def test_operations_are_estimated_from_tokens(tmp_path):
    trainer = make(tmp_path / "run", *PLAIN)
    assert estimate_flops(trainer, 100.0) == 6 * 58 * 100
    assert estimate_flops(trainer, None) is None


@pytest.fixture(autouse=True)
def _restore_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_measuring_the_rate_does_not_change_the_generator():
    state = torch.get_rng_state()
    rate = measure_matrix_rate(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert rate.dtype == torch.float32
    assert rate.size in (256, 512, 1024, 2048, 4096, 8192)
    assert 1e7 < rate.flops_per_second < 1e14


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_device_is_found_by_its_name(name, word):
    found = known_peak(f"cuda:0 ({name}, 80 GiB)", torch.bfloat16)
    assert found == (word, KNOWN_PEAKS[word].half * 1e12)


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA H20", "cpu (8 threads)", "NVIDIA A1000"])
def test_a_device_with_a_similar_name_is_unknown(name):
    assert known_peak(name, torch.bfloat16) is None


def test_the_peak_of_fp32_follows_the_matmul_precision():
    assert known_peak("NVIDIA H200", torch.float32)[1] == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("high")
    assert known_peak("NVIDIA H200", torch.float32)[1] == pytest.approx(494.7e12)


def test_a_dtype_that_a_device_lacks_is_unknown():
    assert known_peak("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert known_peak("Tesla V100-SXM2-32GB", torch.float16) == ("V100", 125e12)
    assert known_peak("NVIDIA H200", torch.float64) is None
