"""The codes of nf4 are those of bitsandbytes and torchao; run by tests/test_integrations.py, which has both."""

import pytest
import torch

from trainwright.models.layers.quantized_linear import NF4, decode, encode

SHAPES = ((128, 256), (192, 320))


def weight_of(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def codes_of(packed):
    return torch.stack([packed >> 4, packed & 15], dim=-1).view(-1)


def error_of(found, weight):
    return float((found - weight).norm() / weight.norm())


def our_error(weight):
    stored = (*encode(weight, "nf4"), torch.tensor(NF4).view(torch.int32))
    return error_of(decode("nf4", stored, tuple(weight.shape)), weight)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_those_of_bitsandbytes(shape):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(shape)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(state.code, torch.tensor(NF4))
    assert torch.equal(encode(weight, "nf4")[0], packed.view(-1))
    theirs = error_of(functional.dequantize_4bit(packed, state), weight)
    assert our_error(weight) == pytest.approx(theirs, rel=0.01)
    assert our_error(weight) <= theirs, "scales of 8 bits cost less than theirs"


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_those_of_torchao(shape):
    module = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = weight_of(shape)
    theirs = module.to_nf4(weight, 64, weight.numel() // 64)
    ours = codes_of(encode(weight, "nf4")[0])
    differences = (ours.int() - codes_of(theirs.quantized_data.view(-1)).int()).abs()
    # Its table has four digits, so that values next to the middle of two codes have the other one.
    assert float((differences > 0).float().mean()) < 5e-4
    assert int(differences.max()) <= 1
    assert our_error(weight) == pytest.approx(error_of(theirs.get_original_weight(), weight), rel=0.01)
