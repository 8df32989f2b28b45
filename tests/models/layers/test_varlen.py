"""Documents by their starts and windows: as their masks, with the kernel of a GPU replaced by its definition."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from tests.messages import mentions

from trainwright.backends import cuda
from trainwright.models.layers import attention as masks
from trainwright.models.layers import kernel_table, varlen_attention
from trainwright.models.layers.attention import attention
from trainwright.models.layers.kernel_table import FASTEST, Row, fastest
from trainwright.models.layers.varlen_attention import band, document_starts

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [5, 5, 6, 6, 6, 6, 6, -1]])


def drawn():
    torch.manual_seed(0)
    return torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)


def varlen_by_definition(query, key, value, starts, keys_starts, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's varlen_attn returns, sequence by sequence."""
    assert (keys_starts is starts, max_q, max_k, enable_gqa) == (True, 8, 8, True)
    assert (starts.dtype, int(starts[-1])) == (torch.int32, len(query))
    result = torch.zeros_like(query)
    for start, stop in zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True):
        if stop > start:
            parts = [each[start:stop].transpose(0, 1)[None] for each in (query, key, value)]
            left, right = window_size
            assert right == 0
            near = band(stop - start, stop - start if left < 0 else left + 1, device=query.device)
            mixed = F.scaled_dot_product_attention(*parts, attn_mask=near, scale=scale, enable_gqa=True)
            result[start:stop] = mixed[0].transpose(0, 1)
    return result


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_definition)
    monkeypatch.setattr(varlen_attention, "_is_served", lambda queries, values: True)


def test_starts_are_those_of_all_rows_and_the_rest_is_empty():
    starts = document_starts(DOCUMENTS).starts
    assert starts.tolist() == [0, 3, 5, 8, 10, 15, *[16] * 11]


@pytest.mark.parametrize("window", [None, 2, 8])
def test_documents_by_their_starts_are_mixed_as_by_their_mask(kernel, window):
    tensors = drawn()
    documents = document_starts(DOCUMENTS, window=window)
    expected = attention(*tensors, mask=documents.visible(), scale=0.3)
    torch.testing.assert_close(attention(*tensors, mask=documents, scale=0.3), expected)
    # Dropout, which the kernel does not have, needs the mask.
    torch.manual_seed(1)
    dropped = attention(*tensors, mask=documents, dropout=0.5)
    torch.manual_seed(1)
    torch.testing.assert_close(dropped, attention(*tensors, mask=documents.visible(), dropout=0.5))


def test_a_window_is_mixed_as_by_its_mask(kernel):
    tensors = drawn()
    expected = attention(*tensors, mask=band(8, 3, device=torch.device("cpu")))
    torch.testing.assert_close(attention(*tensors, window=3), expected)
    documents = document_starts(DOCUMENTS)
    both = documents.visible() & band(8, 3, device=torch.device("cpu"))
    torch.testing.assert_close(attention(*tensors, mask=documents, window=3), attention(*tensors, mask=both))


def test_without_the_kernel_masks_replace_it():
    tensors = drawn()
    assert varlen_attention.attend_within_window(*tensors, 3, scale=None) is None
    documents = document_starts(DOCUMENTS, window=3)
    expected = attention(*tensors, mask=documents.visible())
    torch.testing.assert_close(attention(*tensors, mask=documents), expected)


def test_the_first_line_that_fits_decides(monkeypatch):
    rows = (Row("flex", 1024, (64,)), Row("varlen", 256, range(8, 257, 8)))
    monkeypatch.setattr(kernel_table, "FASTEST", {**FASTEST, "packed": rows})
    assert [fastest("packed", length, 64) for length in (128, 256, 1024)] == ["torch", "varlen", "flex"]
    assert [fastest("packed", 2048, width) for width in (96, 100, None)] == ["varlen", "torch", "flex"]


def test_flash_comes_before_cudnn_only_where_a_newer_version_is_active(monkeypatch):
    orders = []

    def note(*tensors, **options):
        orders.append(torch._C._get_sdp_priority_order()[0])
        return tensors[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    monkeypatch.setattr(masks, "waits_for_memory", lambda device: True)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA3")
    attention(*drawn())
    attention(*drawn(), dropout=0.1)
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: None)
    attention(*drawn())
    assert orders[0] == int(masks.SDPBackend.FLASH_ATTENTION)
    assert orders[1:] == [torch._C._get_sdp_priority_order()[0]] * 2


def test_a_package_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_flash").mkdir()
    (tmp_path / "some_flash" / "__init__.py").write_text("raise ImportError")
    assert not cuda._is_installed("some_flash.cute.interface")
    (tmp_path / "some_flash" / "cute").mkdir()
    assert cuda._is_installed("some_flash.cute.interface")
    assert not cuda._is_installed("other_flash.cute.interface")


def test_flash_attention_is_activated_where_its_package_is_installed(monkeypatch, caplog):
    activated = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", activated.append)
    assert cuda.activate_flash(9) is None  # no package
    package = types.ModuleType("flash_attn_interface")
    package.__spec__ = types.SimpleNamespace(name="flash_attn_interface")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    assert cuda.activate_flash(9) == "FA3"
    assert cuda.activate_flash(8) is None
    assert activated == ["FA3"]
    monkeypatch.setattr("torch.nn.attention.current_flash_attention_impl", lambda: "FA4")
    assert cuda.activate_flash(9) == "FA4"
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    assert cuda.activate_flash(9) is None  # it has no kernels
    assert mentions(caplog.text, "flash_attn_interface", "does not expose FA3")


def test_compiled_code_is_one_graph_with_and_without_the_kernel(monkeypatch):
    def run(queries, keys, values, ids):
        documents = document_starts(ids, window=5)
        return attention(queries, keys, values, mask=documents, window=3) + attention(queries, keys, values, window=4)

    tensors = (*drawn(), DOCUMENTS)
    expected = run(*tensors)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(run, backend="eager", fullgraph=True)(*tensors), expected)

    def plain(query, key, value, starts, *_, scale, window_size, enable_gqa):
        heads = [each.unflatten(0, (2, 8)).transpose(1, 2) for each in (query, key, value)]
        near = band(8, window_size[0] + 1, device=query.device)
        mixed = F.scaled_dot_product_attention(*heads, attn_mask=near, scale=scale, enable_gqa=enable_gqa)
        return mixed.transpose(1, 2).flatten(0, 1)

    monkeypatch.setattr(varlen_attention, "_is_served", lambda queries, values: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", plain)

    def within(queries, keys, values):
        return attention(queries, keys, values, window=4)

    torch._dynamo.reset()
    found = torch.compile(within, backend="eager", fullgraph=True)(*drawn())
    torch.testing.assert_close(found, attention(*drawn(), mask=band(8, 4, device=torch.device("cpu"))))
