"""The server of the live page, by real requests over loopback."""

import contextlib
import gzip
import http.client
import json
import shutil
import threading
import time
from urllib.parse import urlencode

import pytest
from tests.messages import check_message, raises
from tests.watch.folders import HOSTILE, grow_old, write_lines

from trainwright.errors import ConfigError
from trainwright.watch.server import SECURITY_HEADERS, make_server


@contextlib.contextmanager
def serving(folder, **options):
    """Yields a function that sends a request and returns the status, the headers and the body."""
    with make_server(folder, port=0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def send(path, query=None, *, method="GET", headers=None):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
            connection.request(method, path + (f"?{urlencode(query)}" if query else ""), headers=headers or {})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return answer.status, dict(answer.headers), content

        def ask(path, **query):
            query = {
                name: value if isinstance(value, str | int) else json.dumps(value) for name, value in query.items()
            }
            status, _, content = send(path, query)
            assert status == 200, content
            return json.loads(content)

        send.ask, send.port = ask, server.server_port
        try:
            yield send
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def send(runs):
    with serving(runs) as sender:
        yield sender


def test_the_page_has_its_files_and_forbids_everything_else(send):
    total = 0
    for path, kind in (("/", "text/html"), ("/watch.css", "text/css"), ("/plot.js", "text/javascript")):
        status, headers, content = send(path)
        assert status == 200
        assert headers["Content-Type"].startswith(kind)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert {name: headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
        total += len(content)
    total += len(send("/watch.js")[2])
    assert total < 300_000
    assert b"http" not in send("/")[2]  # no external resource


def test_all_runs_are_listed_with_their_state(send):
    found = {run["name"]: run for run in send.ask("/api/runs")["runs"]}
    assert found.keys() == {"plain", "group/broken", HOSTILE.replace("/", "")}
    plain = found["plain"]
    assert (plain["state"], plain["step"], plain["max_steps"], plain["saved_step"]) == ("finished", 12, 12, 12)
    assert plain["best"].startswith("valid/loss ")


def test_an_unchanged_answer_is_not_sent_again(send, runs):
    _, headers, _ = send("/api/runs")
    status, _, again = send("/api/runs", headers={"If-None-Match": headers["ETag"]})
    assert (status, again) == (304, b"")
    _, _, packed = send("/plot.js", headers={"Accept-Encoding": "gzip"})
    assert gzip.decompress(packed) == send("/plot.js")[2]
    assert len(packed) < len(send("/plot.js")[2]) / 2


def test_curves_are_the_values_of_the_log(send, runs):
    lines = [json.loads(line) for line in (runs / "plain" / "metrics.json").read_text().splitlines()]
    found = send.ask("/api/curves", runs=["plain", "absent"], names=["loss", "valid/loss", "absent"])
    assert found.keys() == {"plain"}
    assert found["plain"].keys() == {"loss", "valid/loss"}
    assert found["plain"]["loss"]["x"] == [line["step"] for line in lines]
    assert found["plain"]["loss"]["y"] == pytest.approx([line["loss"] for line in lines], rel=1e-5)
    part = send.ask("/api/curves", runs=["plain"], names=["loss"], low=5, high=7, smoothing="0.5")["plain"]["loss"]
    assert part["x"] == [4, 5, 6, 7, 8]
    assert len(part["sx"]) == len(part["sy"]) == 5


def test_a_growing_cut_and_deleted_run_is_followed(runs, tmp_path):
    shutil.copytree(runs / "plain", tmp_path / "runs" / "live")
    grow_old(tmp_path / "runs")
    path = tmp_path / "runs" / "live" / "metrics.json"
    with serving(tmp_path / "runs") as send:

        def loss():
            return send.ask("/api/curves", runs=["live"], names=["loss"])["live"]["loss"]["x"]

        def version():
            return send.ask("/api/runs")["runs"][0]["version"]["curves"]

        assert loss() == list(range(1, 13))
        seen = version()
        write_lines(path, {"step": 13, "loss": 0.5})
        assert version() != seen
        assert loss() == list(range(1, 14))
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
        assert loss() == [1, 2, 3, 4]
        shutil.copytree(runs / "plain", tmp_path / "runs" / "later")
        shutil.rmtree(tmp_path / "runs" / "live")
        end = time.monotonic() + 10
        while [run["name"] for run in send.ask("/api/runs")["runs"]] != ["later"] and time.monotonic() < end:
            time.sleep(0.05)
        assert [run["name"] for run in send.ask("/api/runs")["runs"]] == ["later"]
        assert send.ask("/api/curves", runs=["live"], names=["loss"]) == {}


def test_a_folder_that_does_not_exist_yet_has_no_runs(tmp_path):
    with serving(tmp_path / "runs") as send:
        assert send.ask("/api/runs")["runs"] == []
        assert send("/api/media", {"run": "x"})[0] == 404


def test_media_settings_log_and_facts_of_a_run(send, runs):
    media = send.ask("/api/media", run="plain")
    status, headers, content = send("/image", {"run": "plain", "file": media["images"]["weights"][0]["file"]})
    assert (status, headers["Content-Type"]) == (200, "image/png")
    assert content.startswith(b"\x89PNG")
    settings = send.ask("/api/settings", runs=["plain", "group/broken"])
    assert settings["plain"]["trainer.max_steps"] == settings["group/broken"]["trainer.max_steps"] == 12
    assert "Resumed" in send.ask("/api/log", run="group/broken")["text"]
    about = send.ask("/api/about", run="group/broken")
    assert [each["step"] for each in about["anomalies"]] == [3]
    assert [step for step, _ in about["starts"]] == [0, 6]
    assert about["model"]["class"] == "Net"


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/../watch.css", None), ("/%2e%2e/server.py", None), ("/page/../../server.py", None),
        ("/image", {"run": "plain", "file": "../config.yaml"}),
        ("/image", {"run": "plain", "file": "index.json"}),
        ("/image", {"run": "plain/../plain", "file": "00000002-0.png"}),
        ("/image", {"run": "..", "file": "00000002-0.png"}),
        ("/image", {"run": HOSTILE.replace("/", ""), "file": "00000001-0.png"}),
        ("/api/log", {"run": "../../etc"}), ("/api/about", {"run": "/etc"}), ("/api/", None), ("/api/media", None),
    ],
)  # fmt: skip
def test_nothing_else_is_found(send, path, query):
    status, headers, content = send(path, query)
    assert status == 404
    assert json.loads(content)["error"]
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize("query", [{"runs": "x"}, {"runs": "[1]"}, {"runs": "[]", "low": "nan"}, {"points": "many"}])
def test_bad_requests_are_explained(send, query):
    status, _, content = send("/api/curves", query)
    assert status == 400
    check_message(json.loads(content)["error"])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_only_get_is_answered(send, method):
    assert send("/api/runs", method=method)[0] == 501


def test_another_host_name_and_other_websites_are_rejected(send):
    for host in ("evil.example", "127.0.0.1.evil.example", ""):
        status, _, content = send("/api/runs", headers={"Host": host})
        assert status == 403
        check_message(json.loads(content)["error"], "Host", golden=False)
    assert send("/api/runs", headers={"Host": f"localhost:{send.port}"})[0] == 200
    assert send("/api/runs", headers={"Host": f"[::1]:{send.port}"})[0] == 200
    other = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert send("/api/runs", headers=other)[0] == 403
    assert send("/", headers={**other, "Sec-Fetch-Mode": "navigate"})[0] == 200


def test_a_token_is_accepted_in_the_url_then_as_a_cookie_and_as_a_header(runs):
    with serving(runs, token="s3cret") as send:
        status, _, content = send("/api/runs")
        assert status == 401
        check_message(json.loads(content)["error"], "token")
        assert send("/", {"token": "wrong"})[0] == 401
        assert send("/", {"token": "s3crét"})[0] == 401
        status, headers, _ = send("/", {"token": "s3cret", "a": "b"})
        assert (status, headers["Location"]) == (303, "/?a=b")
        cookie, *flags = headers["Set-Cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict"} <= set(flags)
        assert send("/api/runs", headers={"Cookie": cookie})[0] == 200
        assert send("/api/runs", headers={"Cookie": cookie[:-1]})[0] == 401
        assert send("/api/runs", headers={"Cookie": "\0=;;"})[0] == 401
        assert send("/api/runs", headers={"Authorization": "Bearer s3cret"})[0] == 200
        assert send("/api/runs", headers={"Authorization": "Bearer s3cret", "Host": "example.org"})[0] == 200
        assert send("//evil.example/", {"token": "s3cret"})[1]["Location"] == "/evil.example/"


def test_a_token_that_no_header_can_carry_and_a_used_port_are_rejected(runs):
    with raises(ConfigError, "--token"):
        make_server(runs, port=0, token="two words")
    with raises(ConfigError, "0.0.0.0", "--token"):
        make_server(runs, host="0.0.0.0", port=0)
    with serving(runs) as send, raises(ConfigError, "--port", golden=False):
        make_server(runs, port=send.port)
