"""How values are described: by their kind, decoded where they are tokens, drawn where they are small images."""

import numpy as np
import pytest
import torch

from trainwright.analysis.data import describe_fields, describe_sample, draw, fields_of


def nothing(ids):
    return None


def spelled(ids):
    return bytes(ids).decode()


def test_nested_mappings_have_dotted_names_and_named_tuples_their_fields():
    assert [name for name, _ in fields_of({"a": {"b": 1, "c": (2, "x")}})] == ["a.b", "a.c.0", "a.c.1"]
    assert [name for name, _ in fields_of(torch.ones(2))] == ["value"]


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_tokens_are_decoded_from_tensors_arrays_and_lists(kind):
    [field] = describe_sample({"input_ids": kind([72, 105])}, spelled)
    assert (field.text, field.shape, field.minimum, field.maximum, field.ids) == ("Hi", (2,), 72, 105, None)


def test_tokens_that_nothing_decodes_show_their_first_ids():
    [field] = describe_sample({"input_ids": list(range(100))}, nothing)
    assert field.ids.startswith("0 1 2 ")
    assert field.ids.endswith("63 …")


def test_labels_tell_how_many_are_left_out_and_what_is_learnt():
    _, field = describe_sample({"input_ids": [72, 105, 33], "labels": [-100, 105, 33]}, spelled)
    assert (field.num_ignored, field.is_as_input_ids, field.text) == (1, True, "i!")
    _, field = describe_sample({"input_ids": [72, 105, 33], "labels": [72, 72, 72]}, spelled)
    assert (field.num_ignored, field.is_as_input_ids, field.text) == (0, False, None)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int32, torch.complex64]
)
def test_tensors_of_every_type_are_described(dtype):
    [field] = describe_sample({"x": torch.ones(2, 3).to(dtype)}, nothing)
    assert (field.type, field.shape) == (str(dtype).removeprefix("torch."), (2, 3))
    assert field.mean == (None if dtype == torch.complex64 else 1.0)


def test_empty_ragged_and_odd_values_are_described_too():
    sample = {
        "none": None,
        "empty": torch.ones(0),
        "ragged": [[1], [2, 3]],
        "bytes": b"abc",
        "chat": [{"role": "user"}],
    }
    texts = {field.name: field.text for field in describe_sample(sample, nothing)}
    assert texts == {
        "none": "None",
        "empty": None,
        "ragged": "[[1], [2, 3]]",
        "bytes": "3 bytes",
        "chat": '[{"role": "user"}]',
    }


def test_a_batch_s_lists_of_texts_are_counted():
    [field] = describe_fields({"text": ["a", "b"]})
    assert (field.type, field.text, field.shape) == ("list", "2 values", None)


def test_small_grey_images_are_drawn_and_nothing_else():
    assert draw(torch.eye(4)) == ("██      ", "  ██    ", "    ██  ", "      ██")
    assert len(draw(torch.eye(28).unsqueeze(0))) == 14
    assert draw(torch.rand(3, 8, 8)) == draw(torch.zeros(8, 8)) == draw(torch.rand(224, 224)) == ()
