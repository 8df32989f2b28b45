"""Attention over heads equals the formula."""

from __future__ import annotations

import torch

from trainwright.models.layers.attention import attend, split_heads


def test_heads_are_views():
    projected = torch.randn(2, 5, 12)
    heads = split_heads(projected, 4)
    assert heads.shape == (2, 3, 5, 4)
    assert heads.data_ptr() == projected.data_ptr()
    assert torch.equal(heads[1, 2, 3], projected[1, 3, 8:12])


def test_attention_is_a_softmax_over_scores():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 6), torch.randn(2, 5, 6), torch.randn(2, 5, 6)
    added = torch.randn(1, 2, 4, 5)
    mixed = attend(queries, keys, values, head_size=3, mask=added, scale=0.7)
    scores = split_heads(queries, 3) @ split_heads(keys, 3).transpose(2, 3) * 0.7 + added
    expected = (scores.softmax(dim=-1) @ split_heads(values, 3)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(mixed, expected)


def test_keys_that_are_not_visible_change_nothing():
    torch.manual_seed(0)
    queries, keys, values = (torch.randn(1, 4, 6) for _ in range(3))
    mask = torch.tensor([True, True, True, False])[None, None, None]
    masked = attend(queries, keys, values, head_size=3, mask=mask)
    torch.testing.assert_close(masked, attend(queries, keys[:, :3], values[:, :3], head_size=3))
