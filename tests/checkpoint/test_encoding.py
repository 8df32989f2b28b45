"""What a state becomes, and that it comes back with every bit, dtype, key and tie."""

from __future__ import annotations

import json
import random
import struct
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from tests.messages import raises

from trainwright.checkpoint.encoding import decode, encode
from trainwright.errors import CheckpointError

EVERY_DTYPE = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex64, torch.complex128),
]


def through_files(state):
    """What a state is after JSON and safetensors have had it."""
    tree, tensors, *_ = encode(state)
    return decode(json.loads(json.dumps(tree, allow_nan=False)), load(save(tensors)))


def assert_same(left, right):
    """Equal in type, order, shape, dtype and bits; nan equals the same nan."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        assert [type(key) for key in left] == [type(key) for key in right]
        left, right = list(left.values()), list(right.values())
    if isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert bits(left) == bits(right)
    elif isinstance(left, (np.ndarray, np.generic)):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, float):
        assert struct.pack("d", left) == struct.pack("d", right)
    else:
        assert left == right


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors_of_any_kind(draw):
    dtype = draw(st.sampled_from(EVERY_DTYPE))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    number = int(np.prod(shape)) * dtype.itemsize
    content = draw(st.binary(min_size=number, max_size=number))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    raw = torch.from_numpy(np.ndarray((number,), np.uint8, bytearray(content)))
    tensor = raw.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.dim() > 1 else tensor


@st.composite
def arrays_of_any_kind(draw):
    dtype = np.dtype(draw(st.sampled_from(["?", "u1", "<i2", ">i4", "u8", "f2", "f4", "f8", "c16", "M8[ns]", "S3"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    number = int(np.prod(shape)) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=number, max_size=number)))
    return np.ndarray(shape, dtype, content)


any_text = st.text(st.characters(), max_size=6)  # half surrogate pairs included
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    any_text,
    st.binary(max_size=5),
    tensors_of_any_kind(),
    arrays_of_any_kind(),
    arrays_of_any_kind().filter(lambda array: array.size).map(lambda array: array.reshape(-1)[0]),
)
keys = st.one_of(any_text, st.sampled_from(["a.b", "a", "b", "$tensor", "__metadata__", "", "a.b#2"]), st.integers())
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(states)
def test_any_state_comes_back_with_every_bit(state):
    assert_same(through_files(state), state)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_every_dtype_keeps_its_bits_also_0_dim_empty_and_non_contiguous(dtype):
    raw = torch.arange(6 * dtype.itemsize).to(torch.uint8)
    values = (raw & 1 if dtype == torch.bool else raw).view(dtype)
    state = {"flat": values, "scalar": values[1], "empty": values[:0].reshape(0, 3), "turned": values.view(2, 3).t()}
    assert_same(through_files(state), state)


def test_a_flat_state_dict_keeps_its_keys_for_use_elsewhere():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    tree, tensors, *_ = encode(model.state_dict())
    assert list(tensors) == list(model.state_dict())
    assert list(tree) == list(model.state_dict())


def test_an_optimizer_state_keeps_its_integer_keys():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    restored = through_files(optimizer.state_dict())
    assert list(restored["state"]) == [0, 1]
    assert_same(restored, optimizer.state_dict())


def test_the_random_states_of_python_numpy_and_torch_come_back():
    state = {"python": random.getstate(), "numpy": np.random.default_rng(3).bit_generator.state}
    state |= {"legacy": np.random.RandomState(3).get_state(), "torch": torch.get_rng_state()}
    restored = through_files(state)
    assert_same(restored, state)
    random.setstate(restored["python"])
    np.random.RandomState().set_state(restored["legacy"])


def test_tied_weights_are_stored_once_and_come_back_tied():
    weight = torch.nn.Parameter(torch.randn(3, 2))
    tree, tensors, *_ = encode({"embed": {"weight": weight}, "head": {"weight": weight.detach()}})
    assert list(tensors) == ["embed.weight"]
    restored = decode(tree, tensors)
    assert restored["embed"]["weight"] is restored["head"]["weight"]


def test_tied_tensors_of_a_dtype_stored_as_bytes_come_back_tied():
    weight = torch.randn(3, dtype=torch.complex128)
    restored = through_files([weight, weight])
    assert restored[0] is restored[1]


def test_different_views_of_one_storage_become_independent_copies():
    whole = torch.arange(6.0)
    state = {"whole": whole, "part": whole[:3], "turned": whole.view(2, 3).t(), "bits": whole.view(torch.int32)}
    restored = through_files(state)
    assert_same(restored, state)
    restored["whole"].zero_()
    assert restored["part"].tolist() == [0, 1, 2]


def test_lazy_conjugates_and_negatives_are_saved_as_their_values():
    value = torch.tensor([1 + 2j, 3 - 4j])
    restored = through_files({"value": value, "conj": value.conj(), "imag": value.conj().imag})
    assert restored["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert restored["imag"].tolist() == [-2, 4]


def test_keys_with_dots_do_not_collide():
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1), "a.b#2": torch.full((1,), 2.0)}
    _, tensors, *_ = encode(state)
    assert len(tensors) == 3
    assert_same(through_files(state), state)


def test_a_tensor_named_like_the_header_of_safetensors_survives():
    state = {"__metadata__": torch.ones(2)}
    assert_same(through_files(state), state)


def test_a_bare_tensor_is_named_after_its_part():
    tree, tensors, *_ = encode(torch.ones(2), name="scaler")
    assert (tree, list(tensors)) == ({"$tensor": "scaler"}, ["scaler"])


def test_restored_arrays_can_be_written_to():
    restored = through_files({"seen": np.zeros(3)})["seen"]
    restored[0] = 1
    assert restored.tolist() == [1, 0, 0]


def test_integers_of_ten_thousand_digits_come_back():
    assert_same(through_files([10**10_000, -(2**200)]), [10**10_000, -(2**200)])


def test_ordered_dicts_and_sizes_come_back_as_plain_dicts_and_tuples():
    assert_same(through_files(OrderedDict(shape=torch.Size([2, 3]))), {"shape": (2, 3)})


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({1, 2}, ["set", "sorted"]),
        (object(), ["object", "torch.Tensor"]),
        (torch.nn.Linear(1, 1), ["torch.nn.modules.linear.Linear"]),
        (Point(1, 2), ["Point", "_asdict"]),
        ({1.5: 2}, ["1.5", "keys must be str or int"]),
        (np.array([object()]), ["numpy dtype object"]),
        (np.ma.masked_array([1], [True]), ["MaskedArray"]),
        (np.zeros(1, dtype=[("x", "f4")]), ["numpy dtype"]),
        (torch.ones(2).to_sparse(), ["sparse"]),
        (torch.empty(2, device="meta"), ["meta"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_rejected_with_its_path_and_type(value, words):
    with pytest.raises(CheckpointError) as caught:
        encode({"InfoHook": {"seen": value}}, name="hooks")
    message = str(caught.value)
    assert message.startswith("hooks.InfoHook.seen: ")
    assert all(word in message for word in words), message


def test_a_list_that_contains_itself_is_rejected():
    endless: list = []
    endless.append(endless)
    with raises(CheckpointError):
        encode(endless)


def test_a_missing_tensor_and_an_unknown_tag_are_named():
    with raises(CheckpointError, "layer.weight"):
        decode({"w": {"$tensor": "layer.weight"}}, {})
    with raises(CheckpointError):
        decode({"$frozenset": []}, {})


def test_tensors_that_a_mapping_creates_at_each_access_are_not_tied():
    class Fresh(dict):
        def items(self):
            return ((name, torch.full((4,), float(index))) for index, name in enumerate(self))

    state = Fresh.fromkeys("abcd")
    assert [tensor[0].item() for tensor in through_files(state).values()] == [0, 1, 2, 3]
