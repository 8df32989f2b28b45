"""`trainwright serve`: a process that answers until it is interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from tests.export.runs import train_run
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright.errors import ConfigError

pytest.importorskip("transformers")


def test_a_run_is_served_until_ctrl_c(tmp_path):
    run, _ = train_run(tmp_path, overrides=["model.max_positions=256"])
    command = [sys.executable, "-m", "trainwright", "serve", str(run), "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "TRAINWRIGHT_SERVE_TOKEN": "s3cret", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"Serving bytes at (http://127\.0\.0\.1:\d+/v1)\. Ctrl-C ends\.\n", line)
            assert found, line + process.stderr.read()
            body = {"model": "bytes", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
            headers = {"Content-Type": "application/json", "Authorization": "Bearer s3cret"}
            request = urllib.request.Request(f"{found[1]}/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] <= 5
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_another_address_without_a_token_is_rejected_before_the_model_is_loaded(monkeypatch):
    monkeypatch.delenv("TRAINWRIGHT_SERVE_TOKEN", raising=False)
    done = CliRunner().invoke(app, ["serve", "absent", "--host", "0.0.0.0"])
    assert isinstance(done.exception, ConfigError)
    assert "--token" in str(done.exception)
