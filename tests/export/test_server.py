"""The server of a model, by real requests over loopback."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.export.runs import train_run
from tests.export.test_chat import BYTES, Scripted
from tests.messages import check_message, raises

from trainwright.errors import ConfigError
from trainwright.export.chat import chat_format
from trainwright.export.server import (
    _IGNORED,
    _NEUTRAL,
    _READ,
    RequestError,
    ServedModel,
    make_server,
    read_request,
)
from trainwright.export.text import load_text_model, stream_text

pytest.importorskip("transformers")

HI = [{"role": "user", "content": "Hi"}]


@contextlib.contextmanager
def serving(model, tokenizer=BYTES, **options):
    """Yields a function that sends a request and returns the status, the headers and the body."""
    model.eval()
    served = ServedModel(
        name="tiny", model=model, format=chat_format(tokenizer), device=torch.device("cpu"), created=int(time.time())
    )
    with make_server(served, port=0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def send(path, body=None, *, method=None, headers=None):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers or {})
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return answer.status, dict(answer.headers), content

        send.port = server.server_port
        try:
            yield send
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_text_model(train_run(tmp_path_factory.mktemp("project"), overrides=["model.max_positions=256"])[0])


def events_of(content):
    """The events of a stream, which ends with [DONE]."""
    parts = content.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_an_answer_in_a_chat_is_that_of_openais_api():
    with serving(Scripted("Grüße<|im_end|>".encode())) as send:
        status, headers, content = send("/v1/chat/completions", {"model": "tiny", "messages": HI, "temperature": 0})
    assert (status, headers["Content-Type"]) == (200, "application/json")
    body = json.loads(content)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    message = {"role": "assistant", "content": "Grüße"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    num_prompt = len(chat_format(BYTES).prompt(HI))
    assert body["usage"] == {"prompt_tokens": num_prompt, "completion_tokens": 17, "total_tokens": num_prompt + 17}


def test_a_stream_has_the_chunks_the_reason_and_the_usage():
    request = {"messages": HI, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    with serving(Scripted("a€<|im_end|>".encode())) as send:
        status, headers, content = send("/v1/chat/completions", request)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    events = events_of(content)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "€"}, {}]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None, None, None, "stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 14


def test_completions_are_those_of_stream_text(run):
    model, tokenizer = run
    request = {"prompt": "def ", "max_tokens": 20, "temperature": 0.9, "top_p": 0.8, "top_k": 30, "seed": 4}
    generator = torch.Generator().manual_seed(4)
    options = {"temperature": 0.9, "top_p": 0.8, "top_k": 30, "generator": generator}
    expected = "".join(stream_text(model, tokenizer, "def ", max_new_tokens=20, **options))
    with serving(model, tokenizer) as send:
        whole = json.loads(send("/v1/completions", request)[2])
        events = events_of(send("/v1/completions", {**request, "prompt": [list(b"def ")], "stream": True})[2])
        penalized = json.loads(send("/v1/completions", {**request, "repetition_penalty": 1.9})[2])
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == expected
    assert whole["choices"][0]["finish_reason"] == "length"
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert penalized["choices"][0]["text"] != expected


def test_a_text_that_stops_ends_the_answer():
    with serving(Scripted(b"one two three<|im_end|>")) as send:
        for stop in ("two", ["three", " two"]):
            body = json.loads(send("/v1/chat/completions", {"messages": HI, "temperature": 0, "stop": stop})[2])
            assert body["choices"][0]["message"]["content"] == ("one " if stop == "two" else "one")
            assert body["choices"][0]["finish_reason"] == "stop"


def test_the_models_are_listed():
    with serving(Scripted(b"x")) as send:
        [entry] = json.loads(send("/v1/models")[2])["data"]
        assert (entry["id"], entry["object"]) == ("tiny", "model")
        assert json.loads(send("/v1/models/tiny")[2]) == entry


WRONG = {
    "empty": {},
    "unknown": {"messages": HI, "max_token": 3},
    "role": {"messages": [{"role": "wizard", "content": "Hi"}]},
    "text": {"messages": "Hi"},
    "n": {"messages": HI, "n": 2},
    "tools": {"messages": HI, "tools": [{"type": "function"}]},
    "temperature": {"messages": HI, "temperature": -1},
    "top_p": {"messages": HI, "top_p": "0.5"},
    "bool": {"messages": HI, "max_tokens": True},
    "zero": {"messages": HI, "max_completion_tokens": 0},
    "both": {"messages": HI, "max_completion_tokens": 3, "max_tokens": 3},
    "stop": {"messages": HI, "stop": [3]},
    "number": {"messages": HI, "temperature": 10**400},
    "positions": {"messages": HI, "max_tokens": 300},
    "limit": {"messages": HI, "max_completion_tokens": 300},
    "long": {"messages": [{"role": "user", "content": "x" * 300}]},
    "array": [1],
    "stream": {"messages": HI, "max_tokens": 300, "stream": True},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_invalid_request_is_answered_with_what_is_wrong(run, name):
    with serving(*run) as send:
        status, _, content = send("/v1/chat/completions", WRONG[name])
    error = json.loads(content)["error"]
    assert status == 400
    assert error["type"] == "invalid_request_error"
    fields = {"positions": "max_tokens", "stream": "max_tokens", "limit": "max_completion_tokens"}
    if name in fields:
        assert error["param"] == fields[name]
        assert "max_new_tokens" not in error["message"]  # a name of ours
    check_message(error["message"])


FIELDS = sorted(
    {*_READ, *_NEUTRAL, *_IGNORED, "messages", "prompt", "role", "content", "type", "text", "include_usage"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5) | st.just("user"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), st.booleans(), st.booleans())
def test_any_request_is_answered_or_rejected(body, is_chat, has_subject):
    if has_subject:
        body = {**body, "messages": HI} if is_chat else {**body, "prompt": "x"}
    with contextlib.suppress(RequestError):
        request = read_request(json.loads(json.dumps(body)), is_chat=is_chat, model="tiny")
        assert set(request.options) >= {"temperature", "top_p", "top_k", "max_new_tokens", "stop_texts"}


def test_a_text_that_is_not_valid_unicode_is_rejected(run):
    with serving(*run) as send:
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
            ("/v1/completions", {"prompt": "\ud800"}),
        ):
            assert send(path, body)[0] == 400


def test_other_invalid_requests_have_their_status(run):
    with serving(*run) as send:
        for path, body, options, expected in (
            ("/v1/chat/completions", b"{", {}, 400),
            ("/v1/completions", {"prompt": ["a", "b"]}, {}, 400),
            ("/v1/completions", {"prompt": [9999]}, {}, 400),
            ("/v1/chat/completions", {"messages": HI, "model": "other"}, {}, 404),
            ("/v1/embeddings", {"input": "x"}, {}, 404),
            ("/v1/model", None, {}, 404),
            ("/v1/models", None, {"headers": {"Host": "example.org"}}, 403),
            ("/v1/completions", None, {"method": "POST", "headers": {"Content-Length": str(10**9)}}, 413),
        ):
            status, _, content = send(path, body, **options)
            assert status == expected, path
            check_message(json.loads(content)["error"]["message"])
        assert send("/v1/models")[0] == 200


def test_a_client_that_leaves_ends_its_answer_and_the_next_is_served():
    model = Scripted(b"x", vocab_size=300)
    with serving(model) as send:
        connection = http.client.HTTPConnection("127.0.0.1", send.port, timeout=20)
        body = json.dumps({"messages": HI, "temperature": 0, "stream": True, "max_tokens": 100_000})
        connection.request("POST", "/v1/chat/completions", body)
        connection.getresponse().read(50)
        connection.close()
        assert send("/v1/models")[0] == 200
        assert model.last < 50_000


def test_a_failure_of_the_model_is_a_server_error():
    class Broken(torch.nn.Module):
        def forward(self, input_ids):
            raise RuntimeError("out of luck")

    with serving(Broken()) as send:
        for stream in (False, True):
            status, _, content = send("/v1/completions", {"prompt": "x", "stream": stream})
            assert status == 500
            error = json.loads(content)["error"]
            assert (error["type"], error["message"]) == ("server_error", "RuntimeError: out of luck")


def test_a_token_is_required_from_clients(caplog):
    with serving(Scripted(b"x"), token="s3cret") as send:
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            status, answered, _ = send("/v1/models", headers=headers)
            assert (status, answered["WWW-Authenticate"]) == (401, "Bearer")
        assert send("/v1/models", headers={"Authorization": "Bearer s3cret", "Host": "example.org"})[0] == 200
    assert "s3cret" not in caplog.text


@pytest.mark.parametrize(
    ("host", "token"), [("0.0.0.0", None), ("example.org", ""), ("::", None), ("127.0.0.1", "a b")]
)
def test_another_address_needs_a_token(host, token):
    with raises(ConfigError, "token"):
        make_server(None, host=host, token=token)


def test_a_port_in_use_is_an_explained_error():
    with serving(Scripted(b"x")) as send, raises(ConfigError, "--port", send.port, golden=False):
        make_server(None, port=send.port)
