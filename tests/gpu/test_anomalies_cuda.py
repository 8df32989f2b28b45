"""Anomalies on a GPU: judged as on the host, held back without the host waiting."""

import math

import pytest
import torch
from torch import nn

from trainwright.anomaly.detection import AnomalyDetector
from trainwright.config import AnomaliesSection
from trainwright.loop.update import ScheduledOptimizer, Updater, persistent_buffers
from trainwright.optim.adamw import AdamW
from trainwright.optim.lion import Lion
from trainwright.optim.muon import Muon
from trainwright.parallel.collectives import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def without_waits():
    """Makes torch raise on anything for which the host waits, between its two calls."""
    yield lambda is_on: torch.cuda.set_sync_debug_mode("error" if is_on else 0)
    torch.cuda.set_sync_debug_mode(0)


def make(device, **settings):
    section = AnomaliesSection(**{"non_finite": "skip", "spike": "skip", "spike_window": 40, **settings})
    return AnomalyDetector(section, device=torch.device(device), rank=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gpu_and_the_host_agree_and_nobody_waits(dtype, without_waits):
    torch.manual_seed(0)
    losses = torch.rand(500, dtype=torch.float64) + 1
    losses[torch.rand(500) < 0.1] *= 100
    losses[torch.rand(500) < 0.05] = math.nan
    losses[torch.rand(500) < 0.1] *= 1.05
    losses = losses.to(dtype)
    host, device = make("cpu", spike_threshold=3.0), make("cuda", spike_threshold=3.0)
    expected = [host.judge(step, loss, torch.tensor(1.0), own_is_finite=True) for step, loss in enumerate(losses)]
    on_device, norm, answers = losses.cuda().unbind(), torch.tensor(1.0, device="cuda"), []
    device.judge(-1, torch.tensor(math.nan, device="cuda"), norm, own_is_finite=True)  # the allocator warms up
    device.look()
    without_waits(True)
    answers = [device.judge(step, loss, norm, own_is_finite=True) for step, loss in enumerate(on_device)]
    without_waits(False)
    assert torch.stack(answers).tolist() == expected
    assert repr(device.look()) == repr(host.look())
    assert device.state_dict() == host.state_dict()


@pytest.mark.parametrize("make_optimizer", [AdamW, Lion, Muon])
def test_a_held_update_moves_nothing_and_nobody_waits(make_optimizer, without_waits):
    def run(inputs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
        optimizer = make_optimizer(model.parameters(), lr=0.01)
        updater = Updater(
            {"main": ScheduledOptimizer(optimizer, lambda step, max_steps: 1.0)},
            global_batch_size=8,
            max_steps=10,
            ranks=Ranks(),
            max_grad_norm=1.0,
            detector=make("cuda"),
            buffers=persistent_buffers(model),
        )
        for step, batch in enumerate(inputs):
            without_waits(step > 3)
            updater.begin_step(step)
            update = updater.begin(8)
            update.backward(model(batch).square().mean())
            update.apply()
        without_waits(False)
        return model.state_dict(), updater.detector.look()

    batches = torch.randn(10, 8, 8, device="cuda").unbind()
    expected, _ = run([*batches[:7], *batches[8:]])
    held, (anomaly,) = run([*batches[:7], batches[7] * math.nan, *batches[8:]])
    assert (anomaly.step, anomaly.kind) == (8, "non_finite")
    assert all(torch.equal(held[name], expected[name]) for name in expected)
