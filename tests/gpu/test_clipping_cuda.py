"""On a GPU fused optimizers clip while they read the gradients; the numbers are those of clipping before."""

import pytest
import torch
from tests.loop.test_update import make_updater

from trainwright.optim.adamw import AdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def weights_after(limit, *, by_hand, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 64).to("cuda", dtype))
    optimizer = AdamW([weight], lr=0.1, **settings)
    updater = make_updater([weight], optimizer=optimizer, lr=0.1, max_grad_norm=None if by_hand else limit)
    for number in range(3):
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(number)).to("cuda", dtype)
        if by_hand:
            weight.grad = None
            (rows @ weight).square().mean().backward()
            torch.nn.utils.clip_grad_norm_([weight], limit)
            optimizer.step()
        else:
            updater.set_rates(number)
            update = updater.begin(lambda: 8)
            update.backward((rows @ weight).square().mean())
            result = update.apply()
            assert result.grad_norm.item() > limit
    return weight


@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16, "master_weights": True}], ids=["fp32", "masters"])
def test_a_clipped_step_is_that_of_gradients_clipped_before(settings):
    found, expected = (weights_after(0.01, by_hand=by_hand, **settings) for by_hand in (False, True))
    near = {} if not settings else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(found, expected, **near)
    if not settings:
        assert found.grad.norm().item() == pytest.approx(0.01, rel=1e-4)


def test_clipping_takes_no_pass_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "_foreach_mul_", None)
    weights_after(0.01, by_hand=False)
