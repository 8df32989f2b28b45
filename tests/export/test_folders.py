"""The folder of an export: an earlier one is replaced, what others put there is kept, other folders are rejected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.messages import mentions, raises

from trainwright.errors import CheckpointError
from trainwright.export.load import earlier_files, export_folder, find_source, is_path, without_paths


def write(folder, *names, overwrite=False):
    with export_folder(folder, run="one", file_format="huggingface", overwrite=overwrite) as staging:
        for name in names:
            (staging / name).write_text("{}" if name.endswith(".json") else "new")


def files_in(folder):
    return {path.name for path in folder.iterdir()} - {"export.json"}


def test_an_earlier_export_goes_and_what_others_put_there_stays(tmp_path):
    folder = tmp_path / "out"
    write(folder, "config.json", "tokenizer.json", "vocab.txt", "model-00001-of-00002.safetensors", "odd.txt")
    others = ("README.md", "adapter_config.json", "adapter_model.safetensors", "pytorch_model.bin")
    for name in others:
        (folder / name).write_text("mine")
    (folder / "notes").mkdir()
    write(folder, "config.json", "model.safetensors")
    assert files_in(folder) == {"config.json", "model.safetensors", "notes", *others}
    assert all((folder / name).read_text() == "mine" for name in others)
    facts = json.loads((folder / "export.json").read_text())
    assert facts["files"] == ["config.json", "export.json", "model.safetensors"]
    assert (facts["run"], facts["format"]) == ("one", "huggingface")


def test_a_folder_of_others_is_rejected_unless_overwritten(tmp_path, caplog):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("theirs")
    with raises(CheckpointError, "--overwrite"):
        write(tmp_path, "config.json")
    assert (tmp_path / "config.json").read_text() == "theirs"
    write(tmp_path, "config.json", overwrite=True)
    assert files_in(tmp_path) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "model.safetensors").read_text() == (tmp_path / "tokenizer.json").read_text() == "theirs"
    assert mentions(caplog.text, "model.safetensors", "tokenizer.json")


def test_no_file_of_others_goes_and_those_that_look_like_weights_are_named(tmp_path, caplog):
    write(tmp_path / "out", "model.safetensors", "model.yaml")
    others = ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    for name in (*others, "main.py"):
        (tmp_path / "out" / name).write_text("mine")
    for overwrite in (False, True):
        caplog.clear()
        write(tmp_path / "out", "model.safetensors", overwrite=overwrite)
        assert files_in(tmp_path / "out") == {"model.safetensors", "main.py", *others}
        assert mentions(caplog.text, ", ".join(sorted(others)))


def test_weights_of_others_that_would_be_read_before_the_shards_are_rejected(tmp_path):
    (tmp_path / "model.safetensors").write_text("theirs")
    shards = ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    with raises(CheckpointError, "model.safetensors"):
        write(tmp_path, *shards, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    write(tmp_path / "ours", "config.json", "model.safetensors")
    write(tmp_path / "ours", *shards)
    assert files_in(tmp_path / "ours") == set(shards)


KILLED = """
import os, sys
from pathlib import Path
from tests.export.test_folders import write
from trainwright.export.load import export_folder

def counted(act):
    def acting(path, *arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return act(path, *arguments, **options)
    return acting

for left in range(6):
    folder = Path(sys.argv[1], str(left))
    write(folder, "config.json", "old.txt")
    (folder / "README.md").write_text("mine")
    child = os.fork()
    if child == 0:
        with export_folder(folder, run="one", file_format="huggingface") as staging:
            for name in ("config.json", "new.json"):
                (staging / name).write_text("{}")
            for name in ("rename", "replace", "unlink"):
                setattr(Path, name, counted(getattr(Path, name)))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
"""


def test_an_export_that_was_killed_between_any_two_moves_can_be_made_again(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=True, cwd=Path(__file__).parents[2])
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 6
    for folder in folders:
        assert any(".writing-" in path.name for path in folder.iterdir())
        write(folder, "config.json", "new.json")
        assert files_in(folder) == {"config.json", "new.json", "README.md"}
        assert json.loads((folder / "export.json").read_text())["files"] == ["config.json", "export.json", "new.json"]


def test_leftovers_of_a_killed_first_export_are_not_files_of_others(tmp_path):
    left = tmp_path / "out" / ".out.writing-0123abcd"
    left.mkdir(parents=True)
    (left / "config.json").write_text("{}")
    write(tmp_path / "out", "config.json")
    assert files_in(tmp_path / "out") == {"config.json"}


def test_an_error_leaves_the_earlier_export_as_it_was(tmp_path):
    write(tmp_path / "out", "config.json")

    def fail():
        with export_folder(tmp_path / "out", run="two", file_format="huggingface") as staging:
            (staging / "config.json").write_text("half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fail()
    assert files_in(tmp_path / "out") == {"config.json"}
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_a_list_of_files_that_was_tampered_with_reaches_no_other_folder(tmp_path):
    write(tmp_path / "out", "config.json")
    (tmp_path / "thesis.txt").write_text("years of work")
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    names = ["../thesis.txt", str(tmp_path / "thesis.txt"), "..", 3, "config.json", "gone.txt"]
    (tmp_path / "out" / "export.json").write_text(json.dumps({**facts, "files": names}))
    assert earlier_files(tmp_path / "out") == ["config.json"]


@pytest.mark.parametrize("content", ["[]", "{}", '{"files": ["a"]}'])
def test_another_export_json_is_not_ours(tmp_path, content):
    (tmp_path / "export.json").write_text(content)
    assert earlier_files(tmp_path) is None


def test_an_export_is_distinguished_from_a_run(tmp_path):
    write(tmp_path / "hf", "config.json", "model.safetensors")
    write(tmp_path / "plain", "model.yaml", "model.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    for name in ("hf", "plain", "other", "nothing"):
        with raises(CheckpointError, str(tmp_path / name)):
            find_source(tmp_path / name)


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "out").write_text("")
    with raises(CheckpointError):
        write(tmp_path / "out", overwrite=True)


def test_absolute_paths_are_shortened_and_removed_from_config_files(tmp_path):
    given = {"type": "/home/me/net.py:Net", "paths": [Path("/a/b.txt"), r"C:\\me\\c.txt"], "name": "org/model", "n": 3}
    assert without_paths(given) == {"type": "net.py:Net", "paths": ["b.txt", "c.txt"], "name": "org/model", "n": 3}
    assert is_path("~/models")
    told = {"name_or_path": "/home/me/words", "vocab_file": "org/words", "unk_token": "/", "n": 1}
    with export_folder(tmp_path / "out", run="one", file_format="huggingface") as staging:
        (staging / "tokenizer_config.json").write_text(json.dumps(told))
    kept = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert kept == {"vocab_file": "org/words", "unk_token": "/", "n": 1}
