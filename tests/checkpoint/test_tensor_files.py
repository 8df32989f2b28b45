"""A tensor file: the bytes that safetensors itself would write, hashed on the way, and read by every reader."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from tests.messages import raises
from torch.distributed.checkpoint import HuggingFaceStorageReader

import trainwright.checkpoint.tensor_files as tensor_files
from trainwright.checkpoint.disk import range_reader
from trainwright.checkpoint.encoding import DTYPE_NAMES, as_split
from trainwright.checkpoint.manifest import FileFact
from trainwright.checkpoint.tensor_files import TensorFile, write_tensors
from trainwright.errors import CheckpointError

PLAIN = {"format": "pt"}


def filled(dtype, *shape):
    number = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.arange(number * dtype.itemsize, dtype=torch.int64).remainder(251).to(torch.uint8)
    return (raw % 2).bool().reshape(shape) if dtype == torch.bool else raw.view(dtype).reshape(shape)


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_bytes_are_those_of_safetensors_for_every_dtype_shape_and_name(tmp_path):
    tensors = {f"{name}.{len(shape)}": filled(dtype, *shape) for dtype, name in DTYPE_NAMES.items()
               for shape in ((), (3,), (2, 0), (5, 3))}  # fmt: skip
    tensors |= {"": filled(torch.float32, 2), 'größe "x"\n': filled(torch.int8, 3), "z" * 300: filled(torch.bool, 1)}
    fact = write_tensors(tmp_path / "a.safetensors", tensors, metadata=PLAIN)
    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == save(tensors, metadata=PLAIN)
    assert (fact.size, fact.sha256) == (len(written), hashlib.sha256(written).hexdigest())


names = st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 3), max_size=3)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.tuples(st.sampled_from(list(DTYPE_NAMES)), shapes), min_size=1, max_size=8))
def test_the_bytes_are_those_of_safetensors(tmp_path, described):
    tensors = {name: filled(dtype, *shape) for name, (dtype, shape) in described.items()}
    path = tmp_path / "a.safetensors"
    path.unlink(missing_ok=True)
    write_tensors(path, tensors, metadata=PLAIN)
    assert path.read_bytes() == save(tensors, metadata=PLAIN)


@pytest.mark.parametrize("beside", [False, True])
def test_a_file_of_many_chunks_has_the_same_hash_with_and_without_a_thread(tmp_path, monkeypatch, beside):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(tensor_files, "THREADED_HASH_BYTES", 0 if beside else 2**60)
    tensors = {"a": torch.randn(10_000), "b": torch.randint(0, 200, (5_001,), dtype=torch.uint8)}
    fact = write_tensors(tmp_path / "a.safetensors", tensors, metadata=PLAIN)
    written = (tmp_path / "a.safetensors").read_bytes()
    assert written == save(tensors, metadata=PLAIN)
    assert fact.sha256 == hashlib.sha256(written).hexdigest()


def test_a_partial_write_continues_with_the_rest(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:1000]))
    tensors = {"a": torch.randn(5_000)}
    write_tensors(tmp_path / "a.safetensors", tensors, metadata=PLAIN)
    assert (tmp_path / "a.safetensors").read_bytes() == save(tensors, metadata=PLAIN)


def test_the_hashing_thread_ends_with_a_write_that_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "THREADED_HASH_BYTES", 0)
    monkeypatch.setattr(os, "write", lambda descriptor, content: 1 / 0)
    threads = set(tensor_files.threading.enumerate())
    with pytest.raises(ZeroDivisionError):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.randn(50)}, metadata=PLAIN)
    assert set(tensor_files.threading.enumerate()) == threads


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    (tmp_path / "a.safetensors").write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, metadata=PLAIN)
    assert (tmp_path / "a.safetensors").read_text() == "mine"


def test_the_file_is_as_readable_as_the_umask_lets_it_be(tmp_path):
    previous = os.umask(0o027)
    try:
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)}, metadata=PLAIN)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o640


def test_a_header_that_no_reader_takes_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "MAX_HEADER_BYTES", 100)
    with raises(CheckpointError, "3", "100"):
        write_tensors(tmp_path / "a", {name: torch.zeros(1) for name in "abc"}, metadata=PLAIN)
    assert not (tmp_path / "a").exists()


def test_safetensors_reads_back_values_and_metadata(tmp_path):
    tensors = {"weight": torch.randn(3, 2).bfloat16(), "step": torch.tensor(3.0)}
    write_tensors(tmp_path / "a.safetensors", tensors, metadata={"format": "pt", "note": "größer"})
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "note": "größer"}
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def load_with_dcp(folder, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it loads in one process
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    return state


def test_torch_distributed_checkpoint_reads_the_same_bits(tmp_path):
    # Its reader slices tensors, which safetensors cannot do for all of the dtypes; these are what models consist of.
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {f"layers.{dtype}": filled(dtype, 4, 3) for dtype in dtypes} | {"optimizer.step": torch.tensor(7.0)}
    write_tensors(tmp_path / "model.safetensors", tensors, metadata=PLAIN)
    loaded = load_with_dcp(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    assert {name: bits(tensor) for name, tensor in loaded.items()} == {
        name: bits(tensor) for name, tensor in tensors.items()
    }


def test_torch_distributed_checkpoint_puts_shards_together_by_their_offsets(tmp_path):
    whole = torch.randn(6, 4)
    for number, rows in enumerate((slice(0, 4), slice(4, 6))):
        offsets = json.dumps({"weight": {"saved_offsets": [rows.start, 0]}})
        path = tmp_path / f"shard-{number}.safetensors"
        write_tensors(path, {"weight": whole[rows].contiguous()}, metadata={**PLAIN, "DCP_SHARDING_INFO": offsets})
    assert torch.equal(load_with_dcp(tmp_path, {"weight": torch.zeros(6, 4)})["weight"], whole)


def opened(path, fact, *, is_verified=False):
    """The file, and the list of the ranges that are read."""
    ranges, read = [], range_reader(path)

    def note(start, stop):
        ranges.append((start, stop))
        return read(start, stop)

    return TensorFile(note, fact, where=path, is_verified=is_verified), ranges


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.tuples(st.sampled_from(list(DTYPE_NAMES)), shapes), min_size=1, max_size=8))
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, described):
    tensors = {name: filled(dtype, *shape) for name, (dtype, shape) in described.items()}
    path = tmp_path / "a.safetensors"
    path.unlink(missing_ok=True)
    file, _ = opened(path, write_tensors(path, tensors, metadata=PLAIN))
    assert file.metadata == PLAIN
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = as_split(file.tensors[name]).whole()
        assert (found.dtype, found.shape, bits(found)) == (tensor.dtype, tensor.shape, bits(tensor))


@pytest.fixture
def chunked(tmp_path, monkeypatch):
    """A file of two tensors in chunks of 4 KiB, and its tensors."""
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 4096)
    tensors = {"a": torch.arange(6400.0).reshape(100, 64), "b": torch.arange(6400.0).neg().reshape(100, 64)}
    path = tmp_path / "a.safetensors"
    return path, write_tensors(path, tensors, metadata=PLAIN), tensors


def test_rows_are_read_in_the_chunks_that_contain_them(chunked):
    path, fact, tensors = chunked
    file, ranges = opened(path, fact)
    for first, last in ((0, 1), (16, 32), (15, 17), (90, 100), (0, 100)):
        ranges.clear()
        assert torch.equal(file.tensors["b"].rows(first, last), tensors["b"][first:last])
        assert len(ranges) == -(-last // 16) - first // 16
        assert all(stop - start <= 4096 for start, stop in ranges)


def test_damage_raises_where_it_is_read(chunked):
    path, fact, tensors = chunked
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    file, _ = opened(path, fact)
    assert torch.equal(file.tensors["a"].rows(0, 100), tensors["a"])
    assert torch.equal(file.tensors["b"].rows(0, 96), tensors["b"][:96])
    with raises(CheckpointError, "a.safetensors"):
        file.tensors["b"].rows(96, 97)
    with raises(CheckpointError, "a.safetensors"):
        opened(path, FileFact(fact.size, fact.sha256))  # without hashes of pieces, the whole file is compared
    file, _ = opened(path, fact, is_verified=True)
    assert not torch.equal(file.tensors["b"].rows(96, 100), tensors["b"][96:])


def test_a_file_that_is_replaced_while_it_is_read_raises(chunked):
    path, fact, tensors = chunked
    file, _ = opened(path, fact)
    path.unlink()
    write_tensors(path, {name: tensor + 1 for name, tensor in tensors.items()}, metadata=PLAIN)
    with raises(CheckpointError, "a.safetensors"):
        file.tensors["a"].rows(0, 1)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS = {
    "not an object": [1],
    "no offsets": {"a": {"dtype": "F32", "shape": [2]}},
    "another dtype": {"a": {**ENTRY, "dtype": ["F32"]}},
    "a negative size": {"a": {**ENTRY, "shape": [-2]}},
    "a size that does not fit": {"a": {**ENTRY, "shape": [3]}},
    "a gap": {"a": {**ENTRY, "shape": [1], "data_offsets": [4, 8]}},
    "an overlap": {"a": ENTRY, "b": ENTRY},
    "beyond the end": {"a": {**ENTRY, "shape": [3], "data_offsets": [0, 12]}},
    "too few": {"a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_rejected(tmp_path, name):
    text = json.dumps(HEADERS[name]).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "a").write_bytes(content)
    with raises(CheckpointError):
        opened(tmp_path / "a", FileFact(len(content), hashlib.sha256(content).hexdigest()))


@pytest.mark.parametrize("length", [0, 9, 2**63])
def test_a_header_of_another_length_is_rejected(tmp_path, length):
    content = length.to_bytes(8, "little") + bytes(8)
    (tmp_path / "a").write_bytes(content)
    with raises(CheckpointError):
        opened(tmp_path / "a", FileFact(len(content), hashlib.sha256(content).hexdigest()))
