"""Newton–Schulz: the polynomial acts on singular values, in batches."""

import pytest
import torch
from tests.optim.references import newton_schulz

from trainwright.optim.muon import as_wide_matrix, orthogonalize

USUAL = (3.4445, -4.7750, 2.0315)


def matrices(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_it_equals_the_polynomial_of_the_singular_values():
    batch = matrices(3, 4, 7)
    found = orthogonalize(batch.double(), USUAL, steps=5, eps=1e-7)
    for matrix, result in zip(batch, found, strict=True):
        torch.testing.assert_close(result, newton_schulz(matrix), rtol=1e-9, atol=1e-9)


def test_coefficients_that_converge_give_the_orthogonal_factor_of_the_svd():
    batch = matrices(2, 5, 8).double()
    u, _, v = torch.linalg.svd(batch, full_matrices=False)
    found = orthogonalize(batch.clone(), (1.875, -1.25, 0.375), steps=40, eps=1e-7)
    torch.testing.assert_close(found, u @ v, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_five_steps_bring_singular_values_near_one(dtype):
    found = orthogonalize(matrices(2, 16, 48).to(dtype), USUAL, steps=5, eps=1e-7)
    assert found.dtype == dtype
    singular = torch.linalg.svdvals(found.float())
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_a_matrix_of_zeros_stays_zero():
    assert not orthogonalize(torch.zeros(1, 2, 3), USUAL, steps=5, eps=1e-7).any()


def test_tensors_become_matrices_that_are_wider_than_tall():
    assert as_wide_matrix(torch.zeros(6, 4)).shape == (4, 6)
    assert as_wide_matrix(torch.zeros(8, 3, 3, 3)).shape == (8, 27)
    assert as_wide_matrix(torch.zeros(64, 2, 3)).shape == (6, 64)
