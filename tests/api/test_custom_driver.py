"""The example of a custom driver, run as its README says."""

import json
import shlex
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tests.forked_program import run_command, run_script

from trainwright import load_checkpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_driver"


@pytest.fixture
def told():
    """What a server on this machine is told; `told.address` is where it listens."""

    class Told(list):
        address = ""

    messages = Told()

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self):
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    messages.address = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield messages
    server.shutdown()
    thread.join()
    server.server_close()


def commands():
    blocks = (EXAMPLE / "README.md").read_text("utf-8").split("```")[1::2]
    return [shlex.split(line) for block in blocks for line in block.splitlines() if line and not line.startswith("cd")]


def test_the_driver_trains_and_then_sends_its_message(tmp_path, told):
    folder = shutil.copytree(EXAMPLE, tmp_path / "example", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    driver, without = commands()
    done = run_script(*driver[1:], cwd=folder, env={"NOTIFY_URL": told.address})
    assert done.returncode == 0, done.stderr
    assert told == [done.stdout.splitlines()[-1]]
    assert told[0].startswith("sine has ended: valid/loss 0.0")  # 0.5 is the variance of what is learned
    assert load_checkpoint(folder / "runs/first").layers[0].out_features == 32
    # Without the driver it is the same run, which has ended.
    again = run_command(*without[1:], cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "nothing is left to do" in again.stderr
    assert "--fresh" in again.stderr


def test_the_driver_is_short():
    assert len((EXAMPLE / "driver.py").read_text("utf-8").splitlines()) < 40
    files = EXAMPLE.glob("*.py")
    assert sum(bool(line.strip()) for path in files for line in path.read_text("utf-8").splitlines()) < 80
