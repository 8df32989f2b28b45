"""What the tests of the shipped models share: weights that show every difference, and the way through files."""

from __future__ import annotations

import pytest
import torch
from tests.models.folders import assert_same_tensors, tensors_in

VOCABULARY = 61


def reference_model(kind, config_kind, spread=0.3, **config):
    """A transformers model whose weights are all random, biases, norms and rows of padding included."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config_kind)(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name.lower() else 0.0))
    return model


def read_as_ours(model_class, reference, folder, **options):
    """The same model as one of ours, by way of the files that transformers writes."""
    reference.save_pretrained(folder)
    return model_class.from_pretrained(folder, **options).eval()


def assert_files_come_back(model, folder):
    """A model that was read from the folder is written with every tensor bit by bit, and transformers reads it."""
    transformers = pytest.importorskip("transformers")
    again = model.save_pretrained(folder.parent / "again")
    assert_same_tensors(tensors_in(folder), tensors_in(again))
    [name] = model.hugging_face_architectures.values()
    theirs, report = getattr(transformers, name).from_pretrained(again, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return theirs.eval()


def tokens(*shape, seed=1):
    """Random tokens, none of which is 0 (padding)."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padding_mask(*lengths, width, left=False):
    """A mask [rows, width] that is 1 at the first (or last) `lengths` places."""
    places = torch.arange(width).expand(len(lengths), width)
    counts = torch.tensor(lengths)[:, None]
    return ((places >= width - counts) if left else (places < counts)).long()


def assert_close(first, second):
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)
