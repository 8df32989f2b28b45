"""Copies of a state on a GPU: in pinned memory that is used again, and written to the same bytes as without a copy."""

import itertools
import json
import time

import pytest
import torch

from trainwright.backends import host_buffers
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.retention import Retention
from trainwright.checkpoint.snapshot import HostBuffers
from trainwright.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def state(value):
    weight = torch.full((300, 200), float(value), device="cuda")
    moments = {"exp_avg": weight.bfloat16(), "turned": weight[:, :7].t(), "step": torch.tensor(float(value))}
    return {
        "model": {"weight": weight, "tied": weight, "empty": torch.empty(2, 0, device="cuda")},
        "optimizers": {"state": moments, "small": [torch.tensor(value, device="cuda") for _ in range(50)]},
    }


def test_a_copy_is_in_pinned_memory_and_in_the_same_one_next_time():
    buffers = HostBuffers()
    first, second = [
        {key: tensor.data_ptr() for key, tensor in buffers.copy_to_host(state(value)).parts["optimizers"][1].items()}
        for value in (1, 2)
    ]
    assert first == second
    snapshot = buffers.copy_to_host(state(3))
    assert snapshot.parts["model"][1]["weight"].is_pinned()
    assert not snapshot.parts["optimizers"][1]["state.step"].is_pinned()  # it is on the host already
    assert torch.equal(snapshot.to_state()["model"]["weight"], torch.full((300, 200), 3.0))


def test_the_copy_is_of_the_moment_though_the_device_is_busy():
    buffers, weight = HostBuffers(), torch.zeros(4000, 4000, device="cuda")
    factor = torch.randn(4000, 4000, device="cuda")
    for _ in range(20):
        factor = torch.tanh(factor @ factor)
    weight.add_(factor)
    expected = factor.cpu()
    snapshot = buffers.copy_to_host({"model": {"weight": weight}})
    weight.zero_()
    torch.cuda.synchronize()
    assert torch.equal(snapshot.parts["model"][1]["weight"], expected)


def busy(seconds=0.5):
    """Keeps the device busy."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_a_copy_that_overlaps_neither_waits_nor_sees_later_changes():
    buffers, weight = HostBuffers(), torch.zeros(4000, 4000, device="cuda")
    buffers.copy_to_host({"model": {"weight": weight}}, overlaps=True).wait()  # the first one allocates, which waits
    weight.fill_(7)
    torch.cuda.synchronize()
    busy()
    weight.add_(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = time.perf_counter()
        snapshot = buffers.copy_to_host({"model": {"weight": weight}}, overlaps=True)
        seconds = time.perf_counter() - start
    finally:
        torch.cuda.set_sync_debug_mode(0)
    weight.zero_()
    assert not torch.cuda.current_stream().query()  # the device has not even begun
    assert seconds < 0.25
    snapshot.wait()
    assert torch.equal(snapshot.parts["model"][1]["weight"], torch.full((4000, 4000), 8.0))


def test_without_room_for_a_second_copy_it_waits():
    torch.cuda.empty_cache()
    buffers, weight = HostBuffers(), torch.ones(2**28, device="cuda")  # 1 GiB
    used = torch.cuda.memory_allocated()  # with what other tests of this process hold
    torch.cuda.reset_peak_memory_stats()
    limit = used + 2**29
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        snapshot = buffers.copy_to_host({"model": {"weight": weight}}, overlaps=True)
        weight.zero_()
        assert bool((snapshot.parts["model"][1]["weight"] == 1).all())
        assert torch.cuda.max_memory_allocated() < limit
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_save_writes_the_state_of_its_moment_while_training_continues(tmp_path):
    weight = torch.zeros(3000, 3000, device="cuda")
    saver = BackgroundSaver(CheckpointStore(tmp_path), retention=Retention(keep_last=None))
    for step in range(1, 6):
        busy(0.05)
        weight.fill_(step)
        saver.save(step, {"model": {"weight": weight}}, metrics={})
        weight.fill_(-1)  # the next update
    saver.close()
    store = CheckpointStore(tmp_path)
    assert [float(store.read(step, "model")["weight"].unique()) for step in store.steps()] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_large_and_small_buffers_share_blocks_without_overlapping():
    tensors = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1, 63, 64, 65, 2**20, 0, 3)]
    spans = sorted((buffer.data_ptr(), buffer.nbytes) for buffer in host_buffers(tensors) if buffer.nbytes)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))


def test_the_files_are_the_same_with_a_copy_and_without(tmp_path):
    store = CheckpointStore(tmp_path)
    for step, asynchronous in ((1, True), (2, False)):
        saver = BackgroundSaver(store, retention=Retention(None), asynchronous=asynchronous)
        saver.save(step, state(5), metrics={})
        saver.wait(must_succeed=True)
        saver.close()
    files = [json.loads((store.path(step) / "MANIFEST.json").read_text())["files"] for step in (1, 2)]
    assert files[0] == files[1]
    assert torch.equal(store.read(1, "model", device="cuda")["weight"], torch.full((300, 200), 5.0, device="cuda"))
