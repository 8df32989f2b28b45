"""media/: images and histograms in the run folder, within limits, also after a kill."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trainwright import EventStorage
from trainwright.writers import media_files
from trainwright.writers.json_lines import JsonLinesWriter, cut_back
from trainwright.writers.media_files import MediaFiles, png_bytes, read_index, shrink, thin

PIXELS = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def index_of(folder):
    return read_index(folder / "media" / "index.json")


def files_of(folder):
    return {path.name for path in (folder / "media").glob("*.png")}


@given(st.sampled_from([1, 3, 4]), st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=30)
def test_a_png_has_the_pixels(channels, height, width, data):
    image = pytest.importorskip("PIL.Image")
    pixels = data.draw(arrays.arrays(np.uint8, (height, width, channels)))
    read = np.asarray(image.open(io.BytesIO(png_bytes(pixels)))).reshape(pixels.shape)
    assert (read == pixels).all()


def test_large_images_are_reduced_to_means():
    pixels = np.zeros((1024, 2000, 1), np.uint8)
    pixels[:, 1000:] = 200
    small = shrink(pixels)
    assert small.shape == (256, 500, 1)
    assert (small[:, :250] == 0).all()
    assert (small[:, 250:] == 200).all()
    assert shrink(np.zeros((1, 5000, 3), np.uint8)).shape == (1, 500, 3)


def test_what_a_step_puts_is_in_the_folder(tmp_path):
    writer, storage = JsonLinesWriter(tmp_path), EventStorage()
    storage.step = 7
    storage.put_image("a/b <c>", PIXELS)
    storage.put_histogram("weights", torch.tensor([-1.0, 0.0, 1.0, torch.nan]))
    storage.publish({"loss": 1.0}, media=storage.take_media())
    writer.write(storage)
    image, histogram = index_of(tmp_path)
    content = (tmp_path / "media" / image["file"]).read_bytes()
    assert image == {
        "step": 7, "kind": "image", "name": "a/b <c>", "file": "00000007-0.png", "bytes": len(content),
        "width": 6, "height": 4,
    }  # fmt: skip
    assert content == png_bytes(PIXELS)
    assert (histogram["low"], histogram["high"]) == (-1, 1)
    assert (sum(histogram["counts"]), histogram["num_values"], histogram["num_not_finite"]) == (3, 3, 1)
    assert histogram["mean"] == pytest.approx(0)
    assert histogram["deviation"] == pytest.approx((2 / 3) ** 0.5)


def test_a_line_without_media_makes_no_folder(tmp_path):
    writer, storage = JsonLinesWriter(tmp_path), EventStorage()
    storage.step = 1
    storage.publish({"loss": 1.0})
    writer.write(storage)
    assert not (tmp_path / "media").exists()


@given(st.integers(1, 400))
def test_thinning_keeps_the_ends_and_covers_the_run(num_steps):
    kept = thin({"step": step, "kind": "image", "name": "a"} for step in range(num_steps))
    steps = [each["step"] for each in kept]
    assert len(steps) <= media_files.MAX_STEPS_PER_NAME
    assert (steps[0], steps[-1]) == (0, num_steps - 1)
    assert len(steps) >= min(num_steps, media_files.MAX_STEPS_PER_NAME // 2)
    assert max(np.diff(steps), default=1) <= max(2 * num_steps / len(steps), 2) + 1


def test_the_folder_stays_within_its_limits(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(media_files, "MAX_STEPS_PER_NAME", 8)
    monkeypatch.setattr(media_files, "MAX_NAMES", 3)
    media = MediaFiles(tmp_path)
    for step in range(1, 101):
        media.add(step, {f"image {number}": PIXELS for number in range(5)}, {})
        assert files_of(tmp_path) == {each["file"] for each in index_of(tmp_path)}
    assert len(caplog.records) == 1
    by_name = {}
    for each in index_of(tmp_path):
        by_name.setdefault(each["name"], []).append(each["step"])
    assert by_name.keys() == {"image 0", "image 1", "image 2"}
    assert all(len(steps) <= 8 and steps[0] == 1 and steps[-1] == 100 for steps in by_name.values())
    size = len(png_bytes(PIXELS))
    monkeypatch.setattr(media_files, "MAX_BYTES", 10 * size)
    media.add(101, {"image 0": PIXELS}, {})
    assert sum(path.stat().st_size for path in (tmp_path / "media").glob("*.png")) <= 10 * size


def test_a_resumed_run_drops_what_comes_after_its_step_and_continues(tmp_path):
    media = MediaFiles(tmp_path)
    for step in range(1, 6):
        media.add(step, {"a": PIXELS}, {})
    with (tmp_path / "media" / "index.json").open("a") as file:
        file.write('{"step": 3, "kind": "ima')  # a kill
    cut_back(tmp_path, 3)
    assert [each["step"] for each in index_of(tmp_path)] == [1, 2, 3]
    assert files_of(tmp_path) == {f"0000000{step}-0.png" for step in (1, 2, 3)}
    assert (tmp_path / "media" / "index.json").read_text().endswith("}\n")
    before = (tmp_path / "media" / "index.json").stat().st_mtime_ns
    cut_back(tmp_path, 3)
    assert (tmp_path / "media" / "index.json").stat().st_mtime_ns == before
    MediaFiles(tmp_path).add(4, {"a": PIXELS}, {})
    assert [each["step"] for each in index_of(tmp_path)] == [1, 2, 3, 4]


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    (tmp_path / "media").write_text("a file")
    media = MediaFiles(tmp_path)
    media.add(1, {"a": PIXELS}, {})
    media.add(2, {"a": PIXELS}, {})
    assert len(caplog.records) == 1
    assert "media" in caplog.text


def test_damaged_lines_of_an_index_are_skipped(tmp_path):
    path = tmp_path / "index.json"
    good = {"step": 1, "kind": "image", "name": "a"}
    path.write_text("\n".join(["{", "[]", "1", '{"step": "1"}', json.dumps(good), '{"step": 2}', "[" * 99_999]))
    assert read_index(path) == [good]
