import logging
import os
import stat
import time

import pytest

from trainwright.config import RunConfig
from trainwright.config import signature as signatures
from trainwright.config.signature import is_signed, key_path, sign

TEXT = "project_dir: /x\nname: grüße\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch, caplog):
    """An account without a key."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    signatures._warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return tmp_path


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def warnings_in(caplog):
    return [record.message for record in caplog.records]


def test_the_key_is_readable_by_its_owner_alone(home):
    previous = os.umask(0)
    try:
        sign(TEXT)
    finally:
        os.umask(previous)
    assert key_path() == home / "config" / "trainwright" / "signing-key"
    assert (mode_of(key_path()), mode_of(key_path().parent), key_path().stat().st_size) == (0o600, 0o700, 32)
    assert [path.name for path in key_path().parent.iterdir()] == ["signing-key"]


def test_a_signature_covers_the_text_and_not_the_path(tmp_path, caplog):
    signed = sign(TEXT)
    assert signed.startswith(TEXT)
    assert is_signed(signed)
    assert sign(TEXT) == signed
    for changed in (TEXT, signed.replace("grüße", "grusse"), signed + "x: 1\n", f"x: 1\n{signed}", "", "\n"):
        assert not is_signed(changed)
    config = RunConfig.from_dict({"name": "x", "imports": ["mine"]})
    config.save(tmp_path / "a" / "config.yaml")
    loaded = RunConfig.load(tmp_path / "a" / "config.yaml")
    assert loaded == config
    assert loaded.untrusted_file is None
    text = (tmp_path / "a" / "config.yaml").read_bytes()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_bytes(text.replace(b"\n", b"\r\n"))  # as some archives and editors do
    assert RunConfig.load(tmp_path / "b" / "config.yaml").untrusted_file is None
    (tmp_path / "b" / "config.yaml").write_bytes(text.replace(b"- mine", b"- evil"))
    assert RunConfig.load(tmp_path / "b" / "config.yaml").untrusted_file is not None
    assert not warnings_in(caplog)


def test_another_account_does_not_accept_it(home, monkeypatch):
    signed = sign(TEXT)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "other"))
    assert not is_signed(signed)
    assert not key_path().exists()  # reading creates nothing
    sign(TEXT)
    assert not is_signed(signed)


@pytest.mark.parametrize("damage", ["readable by others", "torn", "empty"])
def test_an_unsafe_key_is_not_used_and_replaced_with_a_warning(damage, caplog):
    signed = sign(TEXT)
    if damage == "readable by others":
        key_path().chmod(0o640)
    else:
        key_path().write_bytes(b"" if damage == "empty" else key_path().read_bytes()[:20])
    assert not is_signed(signed)
    assert len(warnings_in(caplog)) == 1
    again = sign(TEXT)
    assert len(warnings_in(caplog)) == 2
    assert again != signed
    assert is_signed(again)
    assert not is_signed(signed)
    assert mode_of(key_path()) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_neither_used_nor_replaced(caplog):
    signed = sign(TEXT)
    os.chown(key_path(), 12345, -1)
    before = key_path().read_bytes()
    assert not is_signed(signed)
    assert sign(TEXT) == TEXT
    assert key_path().read_bytes() == before
    assert len(warnings_in(caplog)) == 2


def test_a_pipe_in_place_of_the_key_does_not_block(caplog):
    key_path().parent.mkdir(parents=True)
    os.mkfifo(key_path())
    assert sign(TEXT) == TEXT
    assert not is_signed(f"{TEXT}# signature: hmac-sha256 {'0' * 64}\n")
    assert len(warnings_in(caplog)) == 2


@pytest.mark.parametrize("fault", ["no home", "relative", "a file", "unknown user"])
def test_without_a_key_a_run_is_saved_with_one_warning(home, monkeypatch, caplog, fault):
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(home / "gone"))
    if fault == "relative":  # ignored, as the specification says
        monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    elif fault == "a file":  # as a read-only folder would, whoever the user is
        (home / "file").touch()
        monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "file"))
    elif fault == "unknown user":
        monkeypatch.setattr(signatures, "key_path", _no_home)
    config = RunConfig.from_dict({"name": "x"})
    for number in range(3):
        config.save(home / f"run-{number}" / "config.yaml")
    assert RunConfig.load(home / "run-2" / "config.yaml") == config
    assert len(warnings_in(caplog)) == 1
    assert not (home / "gone").exists()


def _no_home():
    raise RuntimeError("Could not determine home directory.")


def test_processes_that_start_together_agree_on_one_key(home):
    start, children = time.time() + 0.3, []
    for number in range(6):
        child = os.fork()
        if child == 0:
            time.sleep(max(0.0, start - time.time()))
            (home / f"signed-{number}").write_text(sign(f"x: {number}\n"))
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    assert all(is_signed((home / f"signed-{number}").read_text()) for number in range(6))
    assert [path.name for path in key_path().parent.iterdir()] == ["signing-key"]


def test_a_file_system_without_links_has_a_key_too(monkeypatch):
    def no_links(*_):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    assert is_signed(sign(TEXT))
