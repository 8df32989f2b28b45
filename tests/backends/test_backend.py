"""The verbs of a device, as a CPU does them."""

import pytest
import torch
from tests.messages import raises

from trainwright.backends import Backend, checked_device, copy_to_host, host_buffers, pick_backend
from trainwright.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture
def backend():
    return pick_backend("cpu")


def test_auto_picks_a_gpu_if_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_backend("auto").device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert pick_backend("auto", local_rank=2).device == torch.device("cuda", 2)
    assert pick_backend("cuda:1", local_rank=2).device == torch.device("cuda", 1)
    assert type(pick_backend("cpu")) is Backend


def test_missing_devices_are_rejected_with_the_location_of_the_setting(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, "cuda", "runtime.device", at="run.yaml:3"):
        pick_backend("cuda", where="run.yaml:3")
    for device in ("gpu", "cuda:", "cuda:x", "tpu:1"):
        with raises(ConfigError, device):
            pick_backend(device)


def test_a_process_without_a_gpu_is_rejected_with_their_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with raises(ConfigError, "cuda", "3", "2"):
        pick_backend("cuda", local_rank=3)


def test_a_seed_determines_the_random_numbers(backend):
    backend.seed(2**63 - 1)
    first = torch.rand(3)
    backend.seed(1)
    assert not torch.equal(torch.rand(3), first)
    backend.seed(2**63 - 1)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(("precision", "dtype"), list(DTYPES.items()))
def test_a_forward_runs_in_its_precision_and_leaves_it(backend, precision, dtype):
    linear = torch.nn.Linear(2, 2)
    with backend.autocast(precision):
        assert linear(torch.ones(1, 2)).dtype == dtype
    assert linear(torch.ones(1, 2)).dtype == torch.float32


def test_batches_on_a_cpu_are_yielded_one_by_one(backend):
    batches = iter([1, 2, 3])
    handed = backend.to_device(batches)
    assert next(handed) == 1
    assert next(batches) == 2  # nothing was fetched ahead
    assert "cpu" in backend.describe()
    backend.claim()


def test_host_buffers_have_the_shapes_of_their_tensors_and_get_their_values():
    tensors = [torch.randn(3, 2), torch.tensor(7), torch.empty(2, 0), torch.ones(5, dtype=torch.bfloat16)]
    tensors.append(torch.arange(5_000_001))  # more than a thread takes at a time
    buffers = host_buffers(tensors)
    copy_to_host(tensors, buffers)
    for tensor, buffer in zip(tensors, buffers, strict=True):
        assert (buffer.dtype, buffer.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(buffer, tensor)
        assert buffer.numel() == 0 or buffer.data_ptr() != tensor.data_ptr()
    assert host_buffers([]) == []
    copy_to_host([], [])


def test_checked_device_rejects_missing_devices(monkeypatch):
    assert checked_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, "1"):
        checked_device("cuda:1")
    with raises(ConfigError, "gpu"):
        checked_device("gpu")
