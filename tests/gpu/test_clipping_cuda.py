"""On a GPU fused optimizers clip while they read the gradients; the numbers are those of clipping before."""

import pytest
import torch
from tests.loop.test_update import KINDS_THAT_DIVIDE, assert_clipped_in_the_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("kind", KINDS_THAT_DIVIDE)
def test_a_clipped_step_is_that_of_gradients_clipped_before(kind, monkeypatch):
    assert_clipped_in_the_kernel(kind, "cuda", monkeypatch)
