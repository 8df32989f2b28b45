"""Borders of documents in blocks: no pair is lost or won, as attention sees it too, and masks stand in where needed."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from trainwright.memory.activation_checkpointing import recompute_layers
from trainwright.memory.repeated_blocks import compile_stacks
from trainwright.models.gpt2 import GPT2
from trainwright.models.layers import attention as masks
from trainwright.models.layers import document_attention as borders_module
from trainwright.models.layers.attention import WholeSequence
from trainwright.models.layers.document_attention import (
    BLOCK,
    attend_within_documents,
    document_borders,
    flex,
    has_blocks,
    visible_pairs,
)
from trainwright.models.llama import Llama

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 4 * BLOCK}


def packed(*lengths, total=4 * BLOCK):
    """One row of documents of these lengths, and padding."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return F.pad(numbers, (0, total - len(numbers)), value=-1)[None]


ROWS = torch.cat((packed(100, 200, 130), packed(256, 256), packed(512)))


def drawn(dtype=torch.float32, *, width=16):
    torch.manual_seed(0)
    queries = torch.randn(3, 4, 4 * BLOCK, width, dtype=dtype)
    keys, values = torch.randn(2, 3, 2, 4 * BLOCK, width, dtype=dtype)
    return queries, keys, values


def chosen(counts, indices):
    """The table [B, N, N] of blocks that counts and indices speak of."""
    table = torch.zeros(indices.shape[0], *indices.shape[2:], dtype=torch.bool)
    for row, (number, columns) in enumerate(zip(counts[:, 0], indices[:, 0], strict=True)):
        for query, count in enumerate(number.tolist()):
            table[row, query, columns[query, :count].long()] = True
    return table


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=6, max_size=6), st.booleans(), st.integers(0, 127))
def test_blocks_that_are_left_out_hold_no_visible_pair_and_full_ones_no_other(numbers, rising, shift):
    numbers = sorted(numbers) if rising else numbers
    row = torch.tensor(numbers).repeat_interleave(64).roll(0 if rising else shift)[None]
    found = document_borders(row)
    visible = visible_pairs(row)[:, 0].view(1, 3, BLOCK, 3, BLOCK)
    some, every = visible.any(dim=4).any(dim=2), visible.all(dim=4).all(dim=2)
    partial, full = chosen(*found[2:4]), chosen(*found[4:6])
    assert not (partial & full).any()
    assert (some <= (partial | full)).all()
    assert (full <= every).all()
    assert torch.equal(chosen(*found[6:8]), partial.transpose(1, 2))
    assert torch.equal(chosen(*found[8:10]), full.transpose(1, 2))


def test_packed_rows_get_the_blocks_that_torch_finds_by_looking_at_all_pairs():
    expected = create_block_mask(
        lambda batch, head, query, key: (query >= key) & (ROWS[batch, query] == ROWS[batch, key]),
        *(3, 1, 4 * BLOCK, 4 * BLOCK),
        device="cpu",
    )
    names = [name for name in document_borders(ROWS)._fields if name not in ("document_ids", "key_ids")]
    for name, found in zip(names, document_borders(ROWS)[2:], strict=True):
        reference = getattr(expected, name)
        assert torch.equal(found, reference), name
        # The kernel on a GPU finds its place in them by strides, and takes that of the last dim for 1.
        assert (found.dtype, found.stride()) == (reference.dtype, reference.stride()), name


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention_equals_the_mask_of_all_pairs(compiled):
    queries, keys, values = drawn()

    def attend(queries, keys, values, documents):
        return flex(queries, keys, values, document_borders(documents), 0.3, True)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    expected = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible_pairs(ROWS), scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(run(queries, keys, values, ROWS), expected)


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 16), (torch.bfloat16, 24)])
def test_where_the_kernel_cannot_run_the_mask_of_all_pairs_stands_in(dtype, width):
    tensors = drawn(dtype, width=width)
    assert attend_within_documents(*tensors, document_borders(ROWS), scale=None, enable_gqa=True) is None
    mixed = WholeSequence().attend(*tensors, mask=document_borders(ROWS), enable_gqa=True)
    expected = F.scaled_dot_product_attention(*tensors, attn_mask=visible_pairs(ROWS), enable_gqa=True)
    assert torch.equal(mixed, expected)


def test_a_kernel_that_does_not_compile_is_told_of_once_and_given_up(caplog):
    borders_module._compiled_flex.cache_clear()
    tensors = [each.requires_grad_() for each in drawn(torch.bfloat16)]  # no backward of flex attention on a CPU
    with caplog.at_level(logging.WARNING, logger=borders_module.logger.name):
        for _ in range(2):
            mixed = WholeSequence().attend(*tensors, mask=document_borders(ROWS), enable_gqa=True)
    borders_module._compiled_flex.cache_clear()
    mixed.sum().backward()
    assert [record.message for record in caplog.records if "masks over all pairs" in record.message] == [
        caplog.records[0].message
    ]


def test_operations_that_somebody_listens_to_are_those_of_the_mask():
    class Listening(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Listening():
        assert (
            attend_within_documents(*drawn(torch.bfloat16), document_borders(ROWS), scale=None, enable_gqa=True) is None
        )


def test_blocks_are_for_gpus_and_for_rows_of_whole_blocks(monkeypatch):
    assert not has_blocks(ROWS)
    monkeypatch.setattr(borders_module, "waits_for_memory", lambda device: True)
    assert not has_blocks(ROWS)  # planned as if on a GPU
    assert masks.decoder_mask(None, ROWS, is_whole=True).shape == (3, 1, 512, 512)


@pytest.mark.parametrize(("kind", "compiled"), [(Llama, False), (GPT2, False), (Llama, True)])
def test_a_model_gives_the_same_logits_by_borders_and_by_mask(kind, compiled, monkeypatch):
    torch.manual_seed(0)
    model = kind(**SIZES, initializer_range=0.2).to(torch.bfloat16 if compiled else torch.float32).eval()
    batch = {"input_ids": torch.randint(0, 61, (3, 4 * BLOCK)), "document_ids": ROWS}
    made = []
    with torch.no_grad():
        expected = model(**batch)["logits"]
        monkeypatch.setattr(masks, "has_blocks", lambda *_, **__: True)
        make = masks.document_borders
        monkeypatch.setattr(masks, "document_borders", lambda documents: made.append(1) or make(documents))
        # Compiled, the layers call flex attention; in float32 and not compiled they make masks of the borders.
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        found = run(**batch)["logits"]
    assert made == [1]  # once for all layers
    torch.testing.assert_close(found, expected, **({"atol": 0.1, "rtol": 0.05} if compiled else {}))


def test_a_sequence_that_is_split_over_ranks_gets_a_mask(monkeypatch):
    monkeypatch.setattr(masks, "has_blocks", lambda *_, **__: True)
    assert torch.is_tensor(masks.decoder_mask(None, ROWS, is_whole=False))
    assert torch.is_tensor(masks.decoder_mask(torch.ones_like(ROWS), ROWS, is_whole=True))
    assert isinstance(masks.decoder_mask(None, ROWS, is_whole=True), borders_module.DocumentBorders)


@pytest.mark.parametrize("way", ["activation_checkpointing", "compile_repeated_blocks"])
def test_borders_pass_through_recomputed_and_compiled_layers(way, monkeypatch):
    torch.manual_seed(0)
    model = Llama(**SIZES, initializer_range=0.2)
    tokens = torch.randint(0, 61, (3, 4 * BLOCK))
    batch = {"input_ids": tokens, "labels": tokens, "document_ids": ROWS}
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(**batch)["loss"], parameters)
    monkeypatch.setattr(masks, "has_blocks", lambda *_, **__: True)
    if way == "activation_checkpointing":
        recompute_layers(model, ["DecoderLayer"])
    else:
        compile_stacks(model, "model.layers")
    for found, reference in zip(torch.autograd.grad(model(**batch)["loss"], parameters), expected, strict=True):
        torch.testing.assert_close(found, reference)
