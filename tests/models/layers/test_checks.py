"""Settings that cannot make a model are rejected by name, value and remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from tests.messages import raises

from trainwright.errors import ConfigError, DataError
from trainwright.models.layers.settings import check_heads, check_ids, check_keywords, check_length, embed


class Net:
    def __init__(
        self,
        *,
        num_layers: int = 1,
        pad_token_id: int | None = 0,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        rope_theta: float = 1e4,
        tied: bool = True,
        activation: str = "gelu",
        sizes: Sequence[int] = (1, 2),
        image_size: int | Sequence[int] = 8,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        check_keywords(Net.__init__, locals())


def test_what_fits_passes():
    Net()
    Net(num_layers=3, pad_token_id=None, dropout=0, norm_eps=0, rope_theta=2, tied=False, sizes=[4], image_size=[2, 3])
    check_heads(12, 4)
    check_length(8, 8)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("num_layers", 0, "a whole number of at least 1"),
        ("num_layers", 2.0, "a whole number of at least 1"),
        ("num_layers", True, "a whole number of at least 1"),
        ("num_layers", "4", "a whole number of at least 1"),
        ("num_layers", None, "a whole number of at least 1"),
        ("pad_token_id", -1, "a whole number of at least 0"),
        ("dropout", 1.0, "a probability from 0 up to, not including, 1"),
        ("dropout", -0.1, "a probability from 0 up to, not including, 1"),
        ("dropout", "half", "a probability from 0 up to, not including, 1"),
        ("norm_eps", -1e-5, "a number of at least 0"),
        ("norm_eps", float("nan"), "a number of at least 0"),
        ("rope_theta", 0, "a number above 0"),
        ("tied", "yes", "true or false"),
        ("tied", 1, "true or false"),
        ("activation", ["gelu"], "text"),
        ("sizes", 3, "a list of whole numbers of at least 1"),
        ("sizes", [1, 0], "a list of whole numbers of at least 1"),
        ("image_size", 0, "a whole number of at least 1, or a list of two"),
        ("image_size", [8, -8], "a whole number of at least 1, or a list of two"),
        ("scaling", "linear", "a mapping"),
    ],
)
def test_what_no_model_can_be_made_of_is_rejected_by_name_and_value(name, value, wanted):
    with pytest.raises(ConfigError) as caught:
        Net(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}. Use {wanted}."


def test_a_width_that_does_not_split_is_rejected():
    with raises(ConfigError, "hidden_size", "10", "4"):
        check_heads(10, 4)


def test_too_many_tokens_are_rejected_with_both_numbers():
    with raises(DataError, "8", "9"):
        check_length(9, 8)


def test_tokens_of_another_form_are_rejected_by_name():
    check_ids(torch.zeros(2, 3, dtype=torch.int32))
    with raises(DataError, "decoder_input_ids", "2", "3", "4"):
        check_ids(torch.zeros(2, 3, 4, dtype=torch.long), name="decoder_input_ids")
    with raises(DataError, "input_ids"):
        check_ids(torch.zeros(2, 3))


def test_ids_that_an_embedding_lacks_are_named():
    with raises(DataError, "token_type_ids", "1", "7", "4"):
        embed(torch.nn.Embedding(4, 2), torch.tensor([[-1, 7]]), name="token_type_ids")
