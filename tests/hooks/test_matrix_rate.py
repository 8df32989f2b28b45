"""Rates of matrix products."""

import pytest
import torch

from trainwright.hooks.flops import KNOWN_PEAKS, known_peak, measure_matrix_rate


@pytest.fixture(autouse=True)
def _precision_as_before():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def test_the_measured_rate_is_that_of_the_products_and_disturbs_no_generator():
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
def test_a_device_that_only_resembles_one_is_unknown(name):
    assert known_peak(name, torch.bfloat16) is None


def test_fp32_has_the_peak_of_what_torch_multiplies_it_in():
    assert known_peak("NVIDIA H200", torch.float32)[1] == pytest.approx(66.9e12)
    torch.set_float32_matmul_precision("high")
    assert known_peak("NVIDIA H200", torch.float32)[1] == pytest.approx(494.7e12)


def test_what_a_device_cannot_do_is_unknown():
    assert known_peak("Tesla V100-SXM2-32GB", torch.bfloat16) is None
    assert known_peak("Tesla V100-SXM2-32GB", torch.float16) == ("V100", 125e12)
    assert known_peak("NVIDIA H200", torch.float64) is None
