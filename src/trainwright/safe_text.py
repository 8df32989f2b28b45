"""Text for logs, errors, terminals and files of a run: no credentials, no control characters, strict JSON.

Text comes from config files, data and file names, which may have been written by others.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"

_PASSWORD = re.compile(r"(?<=://)(?:([^/\s@:]*):[^/\s]+|[^/\s@:]{20,})@")
"""A user and a password before a host name, or a single long word, which is a token."""
_QUERY = re.compile(
    r"([?&;#](?:[\w.%-]*(?:token|signature|secret|password|passwd|credential|api[-_]?key|access[-_]?key(?:id)?)"
    r"|sig|pwd|auth|key)=)[^&;#\s'\"<>)\]},]+",
    re.IGNORECASE,
)
_MASKED = re.compile(rf"(?:[:/]{re.escape(MASK)}@|[?&;#][\w.%-]+={re.escape(MASK)}(?:[&;#]|$))")
_SECRET = re.compile(r"(^|_)token$|secret|passw|credential|(api|access|private)_?key|webhook", re.IGNORECASE)
_TEXT_TOKEN = re.compile(r"(bos|eos|pad|mask|unk|sep|cls|image|start|end)_token", re.IGNORECASE)
# All but tab and line feed; a carriage return overwrites its line, and the last ones change the order of letters.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def mask_secrets(text: str) -> str:
    """Returns text with the passwords and tokens of its URLs replaced by ***.

    >>> mask_secrets("s3://me:hunter2@host/a?part=1&token=abc")
    's3://me:***@host/a?part=1&token=***'
    """
    if "=" in text:
        text = _QUERY.sub(rf"\1{MASK}", text)
    if "://" in text:
        text = _PASSWORD.sub(lambda found: f"{MASK}@" if found[1] is None else f"{found[1]}:{MASK}@", text)
    return text


def is_masked(url: str) -> bool:
    """Returns True if `mask_secrets` has removed credentials from this URL."""
    return _MASKED.search(url) is not None


def escape_controls(text: str) -> str:
    r"""Returns text with control characters as escapes, so that it cannot control a terminal.

    >>> escape_controls("\x1b[2Jrun")
    '\\x1b[2Jrun'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def safe(text: str) -> str:
    """Returns text for a log or a terminal: without credentials and control characters."""
    return escape_controls(mask_secrets(text))


def json_text(value: Any, **options: Any) -> str:
    """Returns strict JSON, which has no NaN and no infinities: they are null. `options` are those of json.dumps.

    >>> json_text({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    default = options.pop("default", None)

    def walk(item: Any) -> Any:
        if isinstance(item, float):
            return item if math.isfinite(item) else None
        if isinstance(item, Mapping):
            return {key: walk(each) for key, each in item.items()}
        if isinstance(item, list | tuple):
            return [walk(each) for each in item]
        is_known = item is None or isinstance(item, str | int)
        return item if is_known or default is None else walk(default(item))

    return json.dumps(walk(value), allow_nan=False, **options)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings as flat names and plain values, with *** for values whose name is that of a secret.

    Settings that are None are omitted.

    >>> flat_settings({"trainer": {"lr": 0.1, "api_key": "abc"}, "seed": None})
    {'trainer.lr': 0.1, 'trainer.api_key': '***'}
    """
    return dict(_flat(settings, ""))


def _flat(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _flat(item, f"{name}.{index}")
    elif isinstance(value, str) and _is_secret(name.rpartition(".")[2]):
        yield name, MASK
    elif isinstance(value, bool | int | float | str):
        yield name, value
    elif value is not None and value != [] and value != ():
        yield name, json.dumps(value, default=str)


def _is_secret(name: str) -> bool:
    return _SECRET.search(name) is not None and _TEXT_TOKEN.fullmatch(name) is None
