"""What the columns of Arrow cannot say of a sample."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.arrow import Empty, forms_of, restore

dicts = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.just(1), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner | st.lists(inner, max_size=2).map(list), max_size=3),
    max_leaves=6,
)


def filled(value, others):
    """What a column makes of a dict: with the keys of all dicts at its place."""
    if isinstance(value, list):
        inner = [item for other in others if isinstance(other, list) for item in other]
        return [filled(item, inner) for item in value]
    if not isinstance(value, dict):
        return value
    keys = dict.fromkeys(key for other in others if isinstance(other, dict) for key in other)
    return {
        key: filled(value[key], [o[key] for o in others if isinstance(o, dict) and key in o]) if key in value else None
        for key in keys
    }


@settings(max_examples=60)
@given(st.lists(dicts, min_size=1, max_size=4))
def test_a_dict_that_was_filled_up_becomes_what_it_was(samples):
    for sample, form in zip(samples, forms_of(samples, [[]] * len(samples)), strict=True):
        found = filled(sample, samples)
        assert (form is None) == (found == sample)
        if form is not None:
            restore(found, form)
        assert found == sample


def test_empty_arrays_get_their_dtype_and_shape():
    (form,) = forms_of(
        [{"x": [], "m": {"y": []}}], [[Empty(("x",), "float32", (0, 3)), Empty(("m", "y"), "bool", (0,))]]
    )
    sample = {"x": torch.zeros(0, dtype=torch.int64), "m": {"y": None}}
    restore(sample, form)
    assert (sample["x"].dtype, tuple(sample["x"].shape)) == (torch.float32, (0, 3))
    assert sample["m"]["y"].dtype == torch.bool
