"""Credentials and control characters: neither reaches logs, errors, terminals or the files of a run."""

import logging
import sys

import pytest
from tests.forked_program import run_command
from tests.messages import raises

from trainwright import EventStorage, RunConfig, cli, run_experiment
from trainwright.checkpoint.remote_files import RemoteFolder
from trainwright.checkpoint.run_folder import read_config
from trainwright.data.sources.locations import _open_file_system
from trainwright.errors import CheckpointError, DataError, TrainwrightError
from trainwright.log import run_log
from trainwright.safe_text import escape_controls, is_masked, mask_secrets
from trainwright.writers.console import ConsoleWriter

URL = "https://me:hunter2@host/data.txt?part=1&token=t0ken&X-Amz-Signature=s1gned"
SECRETS = ("hunter2", "t0ken", "s1gned")
RED = "\x1b[31m"


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        (URL, "https://me:***@host/data.txt?part=1&token=***&X-Amz-Signature=***"),
        ("s3://key:p@ss@bucket/a", "s3://key:***@bucket/a"),
        ("https://ghp_0123456789abcdefghij@host/a", "https://***@host/a"),
        (
            "https://a.blob.core.windows.net/c?sv=2&sig=x%2By&se=3",
            "https://a.blob.core.windows.net/c?sv=2&sig=***&se=3",
        ),
        ("simplecache::https://u:p@h/x, https://h/y?AWSAccessKeyId=AK&Expires=1", None),
    ],
)
def test_passwords_and_tokens_of_urls_are_masked(url, masked):
    found = mask_secrets(f"GET {url} failed")
    assert masked is None or found == f"GET {masked} failed"
    assert is_masked(mask_secrets(url))
    assert mask_secrets(found) == found
    assert ":p@" not in found
    assert "=AK&" not in found


@pytest.mark.parametrize(
    "text",
    [
        *("sftp://me@host/a", "hf://datasets/org/name@main/a.txt", "s3://bucket/a?versionId=3", "a=1, token=3"),
        *("https://host/a?tokenizer=bpe&max_tokens=3", "run.yaml:3: data", "a@b.c", "http://host:8080/@me"),
    ],
)
def test_other_text_stays(text):
    assert mask_secrets(text) == text
    assert not is_masked(text)


def test_control_characters_are_escaped_and_lines_stay():
    assert escape_controls("a\x1b[2J\r\x9b\x07\u202eb\tc\nd é 日本") == "a\\x1b[2J\\r\\x9b\\x07\\u202eb\tc\nd é 日本"


def test_errors_have_no_credentials():
    error = TrainwrightError(f"{URL} cannot be read.", where=f"override data.train.path={URL}")
    for secret in SECRETS:
        assert secret not in f"{error} {error.problem} {error!r}"


def test_the_log_and_the_terminal_have_neither(tmp_path, capsys, monkeypatch):
    logger = logging.getLogger("trainwright")
    with run_log() as open_files:
        open_files(tmp_path / "log.txt")
        logger.warning("%s%s", RED, URL)
    writer = ConsoleWriter()
    monkeypatch.setattr(sys, "argv", ["trainwright", "train", "run.yaml", f"data.train.path={URL}{RED}"])
    with pytest.raises(SystemExit):
        cli.main()
    storage = EventStorage(max_steps=10)
    storage.step = 1
    storage.publish({f"{RED}loss": 1.0, "note": f"{RED}{URL}"})
    writer.write(storage)
    text = (tmp_path / "log.txt").read_text() + capsys.readouterr().err
    assert "\\x1b[31m" in text
    assert text.count("\\x1b[31mloss") == 1
    for secret in (*SECRETS, "\x1b"):
        assert secret not in text


PARTS = """
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": torch.full((2,), float(index)), "labels": torch.tensor(index % 2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.layer(x)
"""


def train(tmp_path, url, steps):
    settings = {
        "name": "run",
        "output_dir": str(tmp_path / "runs"),
        "model": {"type": "parts.py:Net"},
        "data": {"train": {"type": "parts.py:Points", "source": url}},
        "trainer": {"max_steps": steps, "global_batch_size": 4, "optimizer": {"type": "sgd", "lr": 0.1}},
        "runtime": {"device": "cpu"},
        "writers": ["json"],
    }
    config = RunConfig.from_dict(settings, project_dir=tmp_path)
    run_experiment(config)
    return config


def test_a_run_folder_has_no_credentials_and_resumes_with_those_that_are_given_again(tmp_path, caplog):
    (tmp_path / "parts.py").write_text(PARTS)
    config = train(tmp_path, URL, 2)
    folder = tmp_path / "runs" / "run"
    assert config.data.train.source == URL, "the run itself uses them"
    assert config.masked() != config
    assert read_config(folder).data.train.source == mask_secrets(URL)
    train(tmp_path, URL.replace("hunter2", "hunter3"), 3)  # another password of the same data
    for path in (path for path in folder.rglob("*") if path.is_file()):
        for secret in (*SECRETS, "hunter3"):
            assert secret.encode() not in path.read_bytes(), path
    with raises(CheckpointError, "data.train.source", golden=False) as caught:
        train(tmp_path, URL.replace("@host", "@other"), 4)
    assert "hunter2" not in str(caught.value)


def test_a_masked_address_is_not_opened():
    with raises(DataError, "https://me:***@host", golden=False):
        _open_file_system(mask_secrets(URL))
    with raises(CheckpointError, "checkpoint.folder", golden=False):
        RemoteFolder("ftp://me:***@host/runs").step_folders()


def test_the_list_of_runs_shows_no_control_characters(tmp_path):
    folder = tmp_path / "runs" / f"x{RED}"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: 3\n")
    done = run_command("runs", tmp_path / "runs")
    assert "x\\x1b[31m" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
