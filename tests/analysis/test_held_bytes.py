"""Held bytes, counted on real and on fake tensors."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainwright.analysis import estimate as kinds
from trainwright.analysis.estimate import HeldBytes

MEGABYTE = 2**20


def megabytes(number):
    return torch.zeros(number * MEGABYTE // 4)


def test_freed_tensors_are_not_counted():
    with HeldBytes() as watch:
        first = megabytes(3)
        second = megabytes(2)
        del first
        third = megabytes(1)
    assert watch.total == 3 * MEGABYTE
    assert sum(watch.peak.values()) == 5 * MEGABYTE
    assert second.numel() + third.numel()


def test_views_have_no_memory():
    with HeldBytes() as watch:
        tensor = megabytes(2)
        views = [tensor[:10], tensor.view(2, -1), tensor.detach()]
    assert watch.total == 2 * MEGABYTE
    assert len(views) == 3


def test_the_peak_has_the_bytes_of_each_kind():
    weight = nn.Parameter(megabytes(4))
    with HeldBytes() as watch:
        watch.label([weight], kinds.PARAMETERS)
        with watch.forward():
            kept = weight * 2
            kept = kept * kept  # saves its input, 4 MB
            megabytes(16)  # comes and goes: the peak is here
        watch.label([weight], kinds.PARAMETERS)
    assert watch.peak[kinds.PARAMETERS] == 4 * MEGABYTE
    assert watch.peak[kinds.ACTIVATIONS] == 8 * MEGABYTE
    assert watch.peak[kinds.TEMPORARY] == 16 * MEGABYTE
    assert watch.now[kinds.ACTIVATIONS] == 8 * MEGABYTE
    assert kept.requires_grad


def test_a_new_peak_forgets_the_old_one():
    with HeldBytes() as watch:
        megabytes(8)
        watch.begin_peak()
        kept = megabytes(2)
    assert sum(watch.peak.values()) == 2 * MEGABYTE
    assert watch.most[kinds.TEMPORARY] == 2 * MEGABYTE
    assert kept.numel()


def test_storages_that_grow_and_shrink_are_gathered_parameters():
    with HeldBytes() as watch:
        tensor = megabytes(2)
        storage = tensor.untyped_storage()
        storage.resize_(0)
        empty = watch.total
        storage.resize_(6 * MEGABYTE)
    assert empty == 0
    assert watch.now[kinds.GATHERED] == watch.total == 6 * MEGABYTE


def test_resizing_is_torch_s_own_again_afterwards():
    before = torch.UntypedStorage.resize_
    with pytest.raises(ZeroDivisionError), HeldBytes():
        raise ZeroDivisionError
    assert torch.UntypedStorage.resize_ is before


def step(model):
    """The peak of one forward and backward."""
    with HeldBytes() as watch:
        watch.label(model.parameters(), kinds.PARAMETERS)
        with watch.forward():
            loss = model(torch.zeros(32, 64)).sum()
        loss.backward()
    return watch.peak


def test_tensors_without_memory_count_as_real_ones_do():
    def make():
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8))

    real = step(make())
    with FakeTensorMode():
        imagined = step(make())
    assert imagined == real
    assert real[kinds.ACTIVATIONS] >= 2 * 32 * 256 * 4
