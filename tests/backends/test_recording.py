"""A guarded run returns what the function returns, and rejects what a CUDA graph cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.messages import mentions
from torch import nn

from trainwright.backends.backend import Backend, run_guarded
from trainwright.backends.cuda import copy_packed, pack_scalars, warn_of_constants
from trainwright.errors import HostReadError


def test_a_cpu_repeats_the_function_with_new_inputs():
    backend = Backend(torch.device("cpu"))
    recording, [first] = backend.record(lambda given: [given[0] * 2 + given[1]], [torch.ones(3), torch.ones(3)])
    [second] = recording.replay([torch.arange(3.0), torch.zeros(3)])
    assert first.tolist() == [3.0, 3.0, 3.0]
    assert second.tolist() == [0.0, 2.0, 4.0]


def test_a_guarded_training_step_is_bit_equal():
    def train(is_guarded):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(given):
            optimizer.zero_grad()
            model(given[0]).square().mean().backward()
            optimizer.step()
            return [each.detach().clone() for each in model.parameters()]

        batches = [torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
        return [run_guarded(step, [each]) if is_guarded else step([each]) for each in batches]

    for guarded, plain in zip(train(True), train(False), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(guarded, plain, strict=True))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: torch.equal(x, x),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: np.asarray(x),
        lambda x: torch.from_dlpack(x),
    ],
    ids=["item", "bool", "equal", "mask", "nonzero", "unique", "tolist", "numpy", "array", "dlpack"],
)
def test_operations_that_depend_on_values_are_rejected(read):
    with pytest.raises(HostReadError):
        run_guarded(lambda given: [torch.as_tensor(read(given[0]))], [torch.ones(3)])


def test_compiled_code_runs_eagerly_so_that_the_guards_see_its_operations():
    double = torch.compile(lambda x: 2 * x, backend="aot_eager", fullgraph=True)
    read = torch.compile(lambda x: x.nonzero(), backend="eager")
    for function in (double, read):
        function(torch.ones(3))  # compiled before, as by warm-up updates
    [values] = run_guarded(lambda given: [double(given[0])], [torch.ones(3)])
    assert values.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(HostReadError):
        run_guarded(lambda given: [read(given[0])], [torch.ones(3)])


def test_indexing_by_integers_is_allowed():
    rows = torch.arange(3)
    inputs = [torch.arange(9.0).reshape(3, 3), torch.tensor([2, 0, 1])]
    [values] = run_guarded(lambda given: [given[0][rows, given[1]]], inputs)
    assert values.tolist() == [2.0, 3.0, 7.0]


@pytest.mark.parametrize("seed", [torch.manual_seed, torch.default_generator.manual_seed])
def test_drawing_after_seeding_is_rejected(seed):
    def run(given):
        seed(3)
        return [given[0] + torch.randn(3)]

    with torch.random.fork_rng(), pytest.raises(HostReadError):
        run_guarded(run, [torch.ones(3)])


def test_outputs_of_a_graph_on_another_device_are_warned_of(caplog):
    warn_of_constants([torch.ones(1), torch.tensor(2)], torch.device("cpu"))
    assert caplog.text == ""
    warn_of_constants([torch.ones(1)], torch.device("cuda", 0))
    assert mentions(caplog.text, "0", "graph")


def test_outputs_that_are_packed_are_copied_in_their_order():
    outputs = [
        torch.tensor(1.5),
        torch.arange(3),
        torch.tensor(2),
        torch.tensor(2.5),
        torch.tensor(True),
        torch.ones(1),
    ]
    packed = pack_scalars(outputs)
    assert [indices for _, indices in packed] == [[0, 3], [1], [2], [4], [5]]
    copies = copy_packed(packed)
    for copy, output in zip(copies, outputs, strict=True):
        assert copy.dtype == output.dtype
        assert copy.shape == output.shape
        assert torch.equal(copy, output)
    for tensor, _ in packed:
        tensor.zero_()
    assert copies[1].tolist() == [0, 1, 2]
    assert [float(copies[0]), float(copies[3])] == [1.5, 2.5]
    assert copy_packed(pack_scalars([])) == []
