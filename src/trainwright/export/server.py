"""Serves a model over HTTP with the requests and responses of OpenAI's API, one request at a time.

For trying a checkpoint: one process, Python's own HTTP server, no batching. The requests are checked here, text.py and
chat.py generate the text.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from torch import nn

from trainwright.config.problems import nearest
from trainwright.data.chat import read_messages
from trainwright.errors import ConfigError, DataError, TrainwrightError
from trainwright.export.chat import ChatFormat
from trainwright.export.text import Continuation, seeded_generator
from trainwright.http_access import check_access, is_loopback, is_token, listen
from trainwright.models.generation import Sampling, room_after
from trainwright.safe_text import safe

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 * 2**20
READ_SECONDS = 30
"""The time that a client has to send its request, while others wait."""


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: HTTPStatus = HTTPStatus.BAD_REQUEST, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field

    def body(self) -> dict[str, Any]:
        """Returns the error as OpenAI's API represents it."""
        kind = "invalid_request_error" if self.status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": None}}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model, and the facts that its answers need."""

    name: str
    model: nn.Module
    format: ChatFormat
    device: torch.device
    created: int
    """Seconds since 1970."""


def make_server(
    served: ServedModel, *, host: str = "127.0.0.1", port: int = 8000, token: str | None = None
) -> HTTPServer:
    """Returns a server that listens on a port, 0 for a free one; `serve_forever` answers its requests.

    Another host than this machine requires a token, which clients send as `Authorization: Bearer TOKEN`.
    """
    check_access(host, token)

    class Handler(_Handler):
        pass

    Handler.served, Handler.token = served, token
    return listen(host, port, Handler)


class _Handler(BaseHTTPRequestHandler):
    """One connection with one request: connections that stay open would keep others waiting."""

    served: ServedModel
    token: str | None
    timeout = READ_SECONDS
    server_version = "trainwright"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers `/v1/models`."""
        self._answer(self._models)

    def do_POST(self) -> None:
        """Answers `/v1/chat/completions` and `/v1/completions`."""
        self._answer(self._complete)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs each request without its content."""
        logger.info("%s", safe(format % args))

    def _answer(self, answer: Callable[[], None]) -> None:
        try:
            self._check_access()
            answer()
        except RequestError as error:
            self._send(error.status, error.body())
        except TrainwrightError as error:
            self._send(HTTPStatus.BAD_REQUEST, RequestError(str(error)).body())
        except (BrokenPipeError, ConnectionError, TimeoutError):
            logger.info("The client closed the connection.")
        except Exception as error:
            logger.exception("The request failed.")
            problem = RequestError(f"{type(error).__name__}: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR)
            with suppress(OSError):
                self._send(problem.status, problem.body())

    def _check_access(self) -> None:
        if self.token is not None:
            given = self.headers.get("Authorization", "")
            if not is_token(given, f"Bearer {self.token}"):
                raise RequestError(
                    "The token is missing or wrong. Send the header Authorization: Bearer TOKEN (the API key of the "
                    "client).",
                    status=HTTPStatus.UNAUTHORIZED,
                )
        elif not is_loopback(self.headers.get("Host", "")):
            raise RequestError(
                "The Host header is not this machine. Use http://127.0.0.1, or start the server with --token.",
                status=HTTPStatus.FORBIDDEN,
            )

    def _models(self) -> None:
        served = self.served
        entry = {"id": served.name, "object": "model", "created": served.created, "owned_by": "trainwright"}
        if self.path == "/v1/models":
            self._send(HTTPStatus.OK, {"object": "list", "data": [entry]})
        elif self.path == f"/v1/models/{served.name}":
            self._send(HTTPStatus.OK, entry)
        else:
            raise _unknown_path(self.command, self.path)

    def _complete(self) -> None:
        if self.path not in ("/v1/chat/completions", "/v1/completions"):
            raise _unknown_path(self.command, self.path)
        is_chat = self.path == "/v1/chat/completions"
        request = read_request(self._read_body(), is_chat=is_chat, model=self.served.name)
        with closing(_continue(self.served, request)) as made:
            _check_room(self.served, request, made)
            answer = Answer(made, request, model=self.served.name)
            if request.stream:
                self._stream(answer.events())
            else:
                self._send(HTTPStatus.OK, answer.whole())

    def _read_body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise RequestError("The request has no Content-Length.", status=HTTPStatus.LENGTH_REQUIRED)
        if int(length) > MAX_BODY_BYTES:
            raise RequestError(
                f"The request has {length} bytes, more than {MAX_BODY_BYTES}.",
                status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            )
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The request is not JSON: {error}.") from error

    def _send(self, status: HTTPStatus, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Sends server-sent events; the first one is generated before the status, so that an error has its own."""
        first = next(events)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
        try:
            for event in itertools.chain([first], events):
                self._send_event(json.dumps(event))
            self._send_event("[DONE]")
        except OSError:
            raise  # the client has disconnected
        except Exception as error:  # the status has been sent
            logger.exception("The request failed.")
            problem = RequestError(f"{type(error).__name__}: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR)
            self._send_event(json.dumps(problem.body()))

    def _send_event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()


def _unknown_path(method: str, path: str) -> RequestError:
    known = "GET /v1/models, POST /v1/chat/completions, POST /v1/completions"
    return RequestError(f"There is no {method} {safe(path)[:200]}. There are: {known}.", status=HTTPStatus.NOT_FOUND)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request that has been checked."""

    is_chat: bool
    messages: list[dict[str, Any]] | None
    prompt: str | list[int] | None
    options: dict[str, Any]
    """Arguments of `Continuation`."""
    length_field: str
    """The field that gives `max_new_tokens`."""
    seed: int | None
    stream: bool
    include_usage: bool


# Fields without an effect here: the user, and storage by OpenAI's service.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
# Fields for which only the neutral values are supported.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
}
_READ = (
    "model",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
)


def read_request(body: Any, *, is_chat: bool, model: str) -> Request:
    """Checks the body of a request; a field of null counts as missing."""
    if not isinstance(body, dict):
        raise RequestError("The request is not a JSON object.")
    given = {name: value for name, value in body.items() if value is not None}
    subject = "messages" if is_chat else "prompt"
    known = (subject, *_READ, *_IGNORED, *_NEUTRAL)
    for name, value in given.items():
        if name not in known:
            close = nearest(name, known)
            hint = f' Did you mean "{close}"?' if close else ""
            raise RequestError(f'There is no field "{name[:100]}".{hint}', field=name[:100])
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            allowed = " or ".join(json.dumps(each) for each in _NEUTRAL[name])
            raise RequestError(f"{name} is not supported. Use {allowed}, or remove it.", field=name)
    if "model" in given and given["model"] != model:
        raise RequestError(
            f"There is no model {given['model']!r:.100}. This server has {model!r}.",
            status=HTTPStatus.NOT_FOUND,
            field="model",
        )
    if subject not in given:
        raise RequestError(f"{subject} is missing.", field=subject)
    stream_options = _read(given, "stream_options", dict, "an object", {})
    return Request(
        is_chat=is_chat,
        messages=_read_messages(given["messages"]) if is_chat else None,
        prompt=None if is_chat else _read_prompt(given["prompt"]),
        options=_read_options(given),
        length_field=_length_field(given),
        seed=_read(given, "seed", int, "a whole number", None),
        stream=_read(given, "stream", bool, "true or false", False),
        include_usage=_read(stream_options, "include_usage", bool, "true or false", False),
    )


def _read_messages(value: Any) -> list[dict[str, Any]]:
    try:
        return read_messages(value)
    except DataError as error:
        raise RequestError(str(error), field="messages") from error


def _read_prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(each) is int and each >= 0 for each in value):
        return list(value)
    raise RequestError("prompt is not supported. Use one text, or one list of tokens.", field="prompt")


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Continuation`, with the defaults of OpenAI's API."""
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise RequestError("max_tokens and max_completion_tokens are the same. Remove one.", field="max_tokens")
    name = _length_field(given)
    max_new_tokens = _read(given, name, int, "a whole number", None)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise RequestError(f"{name} is {max_new_tokens}. Use at least 1.", field=name)
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise RequestError("stop is not a text or a list of texts.", field="stop")
    options = {
        "temperature": _read(given, "temperature", float, "a number", 1.0),
        "top_p": _read(given, "top_p", float, "a number", None),
        "top_k": _read(given, "top_k", int, "a whole number", None),
        "repetition_penalty": _read(given, "repetition_penalty", float, "a number", 1.0),
    }
    try:
        Sampling(max_new_tokens=1, **options)
    except ConfigError as error:
        raise RequestError(str(error), field=str(error).split(maxsplit=1)[0]) from error
    return {**options, "max_new_tokens": max_new_tokens, "stop_texts": stop}


def _length_field(given: Mapping[str, Any]) -> str:
    return "max_tokens" if "max_tokens" in given else "max_completion_tokens"


def _read(given: Mapping[str, Any], name: str, kind: type[Any], wanted: str, default: Any) -> Any:
    """Returns a field of a type; whole numbers are numbers, but true and false are not."""
    if name not in given or given[name] is None:
        return default
    value = given[name]
    if kind is float and type(value) is int:
        with suppress(OverflowError):
            value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        raise RequestError(f"{name} is {json.dumps(given[name]):.100}. Use {wanted}.", field=name)
    return value


def _continue(served: ServedModel, request: Request) -> Continuation:
    seed = None if request.seed is None else request.seed % 2**64
    generator = seeded_generator(served.device, seed)
    options = {**request.options, "generator": generator}
    if request.messages is not None:
        return served.format.answer(served.model, request.messages, **options)
    assert request.prompt is not None
    return Continuation(served.model, served.format.tokenizer, request.prompt, **options)


def _check_room(served: ServedModel, request: Request, made: Continuation) -> None:
    """Rejects more tokens than the model has positions for after the prompt."""
    num_prompt, wanted = len(made.prompt), request.options["max_new_tokens"]
    room = room_after(served.model, num_prompt)  # 0 for a prompt that is too long, which the generation reports
    if room and wanted is not None and wanted > room:
        raise RequestError(
            f"{request.length_field} is {wanted}, but after the {num_prompt} tokens of the prompt the model has "
            f"positions for {room}. Use fewer, or remove it.",
            field=request.length_field,
        )


class Answer:
    """The response to a request: complete, or as the events of a stream."""

    def __init__(self, made: Continuation, request: Request, *, model: str) -> None:
        self._made = made
        self._request = request
        kind = "chatcmpl" if request.is_chat else "cmpl"
        self._shared = {"id": f"{kind}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """Returns the answer when it is complete."""
        text = "".join(self._made)
        content = {"message": {"role": "assistant", "content": text}} if self._request.is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": self._finish_reason()}
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": [choice], "usage": self._usage()}

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields the events: chunks of text, then the reason for the end, then the number of tokens if requested."""
        chunks = iter(self._made)
        first = next(chunks, "")  # raises for an invalid request
        if self._request.is_chat:
            yield self._event({"role": "assistant", "content": ""})
        for text in itertools.chain([first] if first else [], chunks):
            yield self._event({"content": text})
        yield self._event({}, finish_reason=self._finish_reason())
        if self._request.include_usage:
            yield {**self._event({}), "choices": [], "usage": self._usage()}

    def _event(self, delta: dict[str, str], *, finish_reason: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": delta} if self._request.is_chat else {"text": delta.get("content", "")}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
        kind = "chat.completion.chunk" if self._request.is_chat else "text_completion"
        return {**self._shared, "object": kind, "choices": [choice]}

    def _finish_reason(self) -> str:
        return "stop" if self._made.is_stopped else "length"

    def _usage(self) -> dict[str, int]:
        num_prompt, num_made = len(self._made.prompt), self._made.num_tokens
        return {"prompt_tokens": num_prompt, "completion_tokens": num_made, "total_tokens": num_prompt + num_made}
