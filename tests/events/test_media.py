"""Images, histograms and texts: putting them anywhere, and reading them after a line."""

import logging
import math

import numpy as np
import pytest
import torch
from PIL import Image
from tests.messages import check_message, raises
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from trainwright import EventStorage, get_event_storage
from trainwright.errors import TrainwrightError
from trainwright.events import media
from trainwright.events import storage as storages
from trainwright.events.media import Media, merge_media


@pytest.fixture
def storage():
    with EventStorage() as storage:
        storage.step = 1
        yield storage


GRADIENT = torch.arange(2 * 5, dtype=torch.uint8).reshape(2, 5)
COLOR = torch.stack([GRADIENT, GRADIENT + 10, GRADIENT + 20])  # CHW


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (COLOR, COLOR.permute(1, 2, 0)),
        (COLOR.permute(1, 2, 0), COLOR.permute(1, 2, 0)),
        (COLOR.numpy(), COLOR.permute(1, 2, 0)),
        (COLOR.permute(1, 2, 0).numpy(), COLOR.permute(1, 2, 0)),
        (COLOR.float() / 255, COLOR.permute(1, 2, 0)),
        (COLOR.bfloat16() / 255, COLOR.permute(1, 2, 0)),
        (COLOR.long(), COLOR.permute(1, 2, 0)),
        (GRADIENT, GRADIENT[:, :, None]),
        (GRADIENT[None], GRADIENT[:, :, None]),
        (GRADIENT.numpy().astype(np.float64) / 255, GRADIENT[:, :, None]),
        (GRADIENT > 4, (GRADIENT > 4)[:, :, None] * 255),
        (Image.fromarray(COLOR.permute(1, 2, 0).numpy()), COLOR.permute(1, 2, 0)),
        (Image.fromarray(GRADIENT.numpy()), GRADIENT[:, :, None]),
        (torch.tensor([[math.nan, 1.0]]), torch.tensor([[[0], [255]]])),
    ],
)
def test_every_form_of_an_image_has_the_same_pixels(storage, caplog, image, expected):
    storage.put_image("a", image)
    pixels = storage.take_media().images["a"]
    assert pixels.dtype == np.uint8
    assert pixels.tolist() == expected.tolist()
    assert not caplog.records


def test_an_array_and_a_tensor_of_3_rows_and_3_columns_have_their_own_order(storage):
    cube = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    storage.put_image("array", cube)
    storage.put_image("tensor", torch.from_numpy(cube))
    images = storage.take_media().images
    assert images["array"].tolist() == cube.tolist()
    assert images["tensor"].tolist() == cube.transpose(1, 2, 0).tolist()


@pytest.mark.parametrize("image", ["a.png", [[0.0]], torch.ones(4), torch.ones(2, 5, 6), torch.ones(0, 3)])
def test_what_is_no_image_is_rejected(storage, image):
    with raises(TrainwrightError, "put_image", "'a'"):
        storage.put_image("a", image)


def test_a_batch_of_images_is_rejected_with_a_hint(storage):
    with raises(TrainwrightError, "put_image", "make_grid"):
        storage.put_image("a", torch.ones(4, 3, 8, 8))


def test_values_outside_the_range_are_clamped_with_one_warning_and_normalize_rescales_them(storage, caplog):
    image = torch.tensor([[-1.0, 0.0, 1.0]])
    for _ in range(2):
        storage.put_image("a", image)
        assert storage.take_media().images["a"].flatten().tolist() == [0, 0, 255]
    (record,) = caplog.records
    check_message(record.getMessage(), "put_image", "'a'", "normalize=True")
    storage.put_image("b", image, normalize=True)
    assert storage.take_media().images["b"].flatten().tolist() == [0, 128, 255]
    storage.put_image("constant", torch.full((2, 2), 7.0), normalize=True)
    assert storage.take_media().images["constant"].flatten().tolist() == [0] * 4


def test_the_last_image_and_text_of_a_name_are_kept_and_taken_once(storage):
    for step in (1, 2):
        storage.step = step
        storage.put_image("a", torch.full((2, 2), step, dtype=torch.uint8))
        with storage.name_scope("inner"):
            storage.put_text("b", f"text {step}")
    taken = storage.take_media()
    assert taken.images["a"].flatten().tolist() == [2] * 4
    assert taken.texts == {"inner/b": "text 2"}
    assert not storage.take_media()


def test_a_change_in_place_after_a_put_does_not_change_an_image(storage):
    tensor, array = torch.ones(2, 2, dtype=torch.uint8), np.ones((2, 2), dtype=np.uint8)
    storage.put_image("a", tensor)
    storage.put_image("b", array)
    tensor += 5
    array += 5
    assert {image.max() for image in storage.take_media().images.values()} == {1}


@pytest.mark.parametrize("put", ["put_image", "put_histogram", "put_text"])
def test_the_loops_own_names_are_rejected(storage, put):
    with raises(TrainwrightError, "loss"):
        getattr(storage, put)("loss", "a" if put == "put_text" else torch.ones(2, 2))


def test_a_text_that_is_not_text_and_complex_values_are_rejected(storage):
    with raises(TrainwrightError, "put_text", "int"):
        storage.put_text("a", 3)
    with raises(TrainwrightError, "put_histogram", "complex"):
        storage.put_histogram("a", torch.ones(2, dtype=torch.complex64))


def histogram_of(storage, values):
    storage.put_histogram("a", values)
    return storage.take_media().histograms["a"]


def test_a_histogram_counts_every_value_in_its_bin(storage):
    values = torch.randn(10_000) * 3
    found = histogram_of(storage, values)
    counts, right = found.buckets()
    left = np.concatenate([[-math.inf], right[:-1]])
    expected = [int(((values >= low) & (values < high)).sum()) for low, high in zip(left, right, strict=True)]
    # Values that are equal to an edge up to rounding may be in the bin next to it.
    assert sum(abs(one - other) for one, other in zip(counts, expected, strict=True)) <= 4
    assert found.num_values == 10_000
    assert (found.minimum, found.maximum) == (values.min(), values.max())
    assert found.total == pytest.approx(values.sum().item(), rel=1e-4)
    assert found.total_squares == pytest.approx(values.square().sum().item(), rel=1e-4)


def test_equally_wide_bins_are_close_to_those_of_numpy(storage):
    values = torch.randn(100_000)
    counts, edges = histogram_of(storage, values).linear(32)
    expected, expected_edges = np.histogram(values.numpy(), bins=32)
    assert counts.sum() == 100_000
    np.testing.assert_allclose(edges, expected_edges, rtol=1e-5)
    assert np.abs(counts - expected).max() < 0.01 * 100_000


@pytest.mark.parametrize(
    ("values", "counts", "ends"),
    [
        (torch.full((5,), 3.0), [0, 0, 5, 0], (2.5, 3.5)),
        (torch.zeros(3), [0, 0, 3, 0], (-0.5, 0.5)),
        (torch.tensor([0, 4]), [1, 0, 0, 1], (0.0, 4.0)),
        (torch.tensor([True, False, True]), [1, 0, 0, 2], (0.0, 1.0)),
        ([1.0, 2.0], [1, 0, 0, 1], (1.0, 2.0)),
        (np.array([-1e12, 1e12]), [1, 0, 0, 1], (-1e12, 1e12)),
        (torch.zeros(0), [0], (0.0, 1.0)),
    ],
)
def test_special_distributions(storage, values, counts, ends):
    found, edges = histogram_of(storage, values).linear(4)
    assert found.sum() == sum(counts)
    assert (edges[0], edges[-1]) == pytest.approx(ends)
    assert found.tolist() == counts


def test_values_that_are_not_finite_are_counted_apart(storage):
    found = histogram_of(storage, torch.tensor([1.0, math.nan, math.inf, -math.inf, 2.0]))
    assert (found.num_values, found.num_not_finite) == (2, 3)
    assert (found.minimum, found.maximum, found.total) == (1.0, 2.0, 3.0)
    none = histogram_of(storage, torch.full((4,), math.nan))
    assert (none.num_values, none.num_not_finite) == (0, 4)
    assert none.buckets()[0].tolist() == []


def test_large_tensors_are_counted_in_parts(storage, monkeypatch):
    values = torch.randn(1000)
    whole = histogram_of(storage, values)
    monkeypatch.setattr(media, "_CHUNK", 64)
    parts = histogram_of(storage, values)
    assert parts.bins.tolist() == whole.bins.tolist()
    assert parts.counts.tolist() == whole.counts.tolist()
    assert (parts.minimum, parts.maximum) == (whole.minimum, whole.maximum)


def test_puts_of_one_step_add_up_and_a_later_step_replaces_them(storage):
    storage.put_histogram("a", torch.tensor([1.0, 2.0]))
    storage.put_histogram("a", torch.tensor([8.0]))
    both = storage.take_media().histograms["a"]
    assert (both.num_values, both.minimum, both.maximum, both.total) == (3, 1.0, 8.0, 11.0)
    storage.put_histogram("a", torch.tensor([1.0, 2.0]))
    storage.step = 2
    storage.put_histogram("a", torch.tensor([5.0]))
    assert storage.take_media().histograms["a"].num_values == 1


def test_a_put_keeps_no_graph_alive(storage):
    weight = torch.ones(4, 4, requires_grad=True)
    storage.put_image("a", weight * 0.5)
    storage.put_histogram("a", weight * 2)
    assert not any(
        torch.is_tensor(each) and each.requires_grad for _, put in storage._media.values() for each in (*put, put.value)
    )


def test_what_a_line_has_is_bounded_and_the_rest_is_dropped_with_one_warning(storage, caplog, monkeypatch):
    monkeypatch.setattr(storages, "MAX_BYTES", 100)
    for number in range(5):
        storage.put_image(f"image {number}", torch.zeros(6, 6, dtype=torch.uint8))
    storage.put_image("image 0", torch.ones(6, 6, dtype=torch.uint8))  # replaces the first
    assert list(storage.take_media().images) == ["image 1", "image 0"]
    (record,) = caplog.records
    check_message(record.getMessage(), "put_image", "image 2", golden=False)


class Putting(nn.Module):
    """Puts what it computes, in every form."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        storage = get_event_storage()
        storage.put_histogram("outputs", y)
        storage.put_image("outputs", y.sigmoid())
        storage.put_text("note", "seen")
        return y.relu()


def test_a_recomputed_block_puts_once(storage):
    model, x = Putting(), torch.randn(8, 4)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert storage.take_media().histograms["outputs"].num_values == 32


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_compiled_code_puts_without_a_graph_break_or_a_new_compilation(storage, num_micro_batches):
    torch._dynamo.reset()
    counter, model = CompileCounter(), Putting()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for step in range(1, 5):
        storage.step = step
        for _ in range(num_micro_batches):
            x = torch.randn(8, 4)
            compiled(x)
            storage.file_traced()  # as the loop does after each micro-batch
        taken = storage.take_media()
        assert taken.histograms["outputs"].num_values == 32 * num_micro_batches
        expected = (model.linear(x).sigmoid() * 255).round().to(torch.uint8)
        assert taken.images["outputs"][:, :, 0].tolist() == expected.tolist()
        assert taken.texts == {"note": "seen"}
        counts.append(counter.frame_count)
    assert counts == [1, 1, 1, 1]


def test_puts_of_a_captured_step_are_put_again_after_each_replay(storage):
    storage.put_text("before", "kept")
    storage.begin_recording()
    Putting()(torch.randn(8, 4))
    puts = storage.end_recording()
    assert {(name, kind) for name, _, _, kind in puts} == {
        ("outputs", "histogram"),
        ("outputs", "image"),
        ("note", "text"),
    }
    assert storage.take_media().texts == {"before": "kept"}
    for step in (2, 3):
        storage.step = step
        storage.put_again(puts)
    taken = storage.take_media()
    assert taken.histograms["outputs"].num_values == 32
    assert (list(taken.images), taken.texts) == (["outputs"], {"note": "seen"})


def test_a_trial_forward_puts_nothing(storage):
    storage.put_text("a", "kept")
    with storage.isolated():
        Putting()(torch.randn(8, 4))
    assert storage.take_media().texts == {"a": "kept"}


def test_ranks_other_than_the_first_put_nothing_but_shards():
    other = EventStorage(keeps_media=False)
    other.put_image("a", torch.ones(2, 2))
    other.put_text("a", "text")
    other.put_histogram("a", torch.ones(2))
    assert not other.take_media()


def test_the_lowest_rank_has_the_image_and_histograms_of_shards_add_up():
    def of(text, values, members):
        storage = EventStorage()
        storage.put_text("t", text)
        storage.put_histogram("h", values)
        taken = storage.take_media()
        shards = {name: media.Histogram(*_fields(each), members) for name, each in taken.histograms.items()}
        return Media(taken.images, shards, taken.texts)

    ranks = [of("first", torch.ones(3), (0, 1)), of("second", torch.zeros(4), (0, 1)), Media(texts={"own": "third"})]
    merged = merge_media(ranks)
    assert merged.texts == {"t": "first", "own": "third"}
    assert (merged.histograms["h"].num_values, merged.histograms["h"].minimum) == (7, 0.0)
    plain = merge_media([of("first", torch.ones(3), ()), of("second", torch.zeros(4), ())])
    assert plain.histograms["h"].num_values == 3


def _fields(histogram):
    names = ("bins", "counts", "minimum", "maximum", "total", "total_squares", "num_not_finite")
    return [getattr(histogram, name) for name in names]


def test_a_set_s_storage_is_adopted_under_its_name(storage):
    with EventStorage() as of_set:
        Putting()(torch.randn(8, 4))
    storage.adopt_media(of_set, prefix="valid/")
    taken = storage.take_media()
    assert (list(taken.images), list(taken.histograms), list(taken.texts)) == (
        ["valid/outputs"],
        ["valid/outputs"],
        ["valid/note"],
    )


def test_nothing_is_logged_for_a_plain_put(storage, caplog):
    with caplog.at_level(logging.DEBUG, logger="trainwright"):
        Putting()(torch.randn(8, 4))
        storage.take_media()
    assert not caplog.records
