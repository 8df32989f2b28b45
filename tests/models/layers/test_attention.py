"""Attention over heads equals the formula."""

from __future__ import annotations

import torch
from tests.messages import raises

from trainwright.errors import DataError
from trainwright.models.layers import attention
from trainwright.models.layers.attention import WholeSequence, attend, split_heads


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


def test_grouped_heads_are_repeated_for_a_mask_with_the_same_result(monkeypatch):
    """Where no kernel takes grouped heads with a mask, as on a GPU in fp32; here it is as if this were one."""
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(2, heads, 5, 24, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    expected = WholeSequence().attend(queries, keys, values, mask=mask, enable_gqa=True)
    assert not attention.needs_equal_heads(queries)
    monkeypatch.setattr(attention, "waits_for_memory", lambda device: True)
    asked = [
        (torch.float32, 64),
        (torch.bfloat16, 64),
        (torch.bfloat16, 128),
        (torch.float16, 100),
        (torch.float16, 256),
    ]
    found = [attention.needs_equal_heads(torch.zeros(1, 4, 2, width, dtype=dtype)) for dtype, width in asked]
    assert found == [True, False, False, True, True]
    given = []
    exact = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        attention.F,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: (given.append(kwargs), exact(*args, **kwargs))[1],
    )
    mixed = WholeSequence().attend(queries, keys, values, mask=mask, enable_gqa=True)
    assert given[0]["enable_gqa"] is False
    torch.testing.assert_close(mixed, expected)


def test_a_mask_of_integers_is_rejected_with_the_function_for_it():
    states = torch.zeros(2, 1, 4, 8)
    with raises(DataError, "int64", "decoder_mask(attention_mask)"):
        attention.attention(states, states, states, mask=torch.ones(2, 4, dtype=torch.long))
