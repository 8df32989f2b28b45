"""Answers the page of `trainwright watch`: static files, and JSON about the runs below a folder. GET only, read-only.

A run is found by its name among those that were listed, never by a path of the request. Programs of this machine need
no token; clients of other machines send it in the URL once, and then in a cookie. page/watch.js makes the requests.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import numpy as np

from trainwright.http_access import check_access, is_loopback, is_token, listen
from trainwright.safe_text import json_text, safe
from trainwright.watch.listing import find_runs, name_of
from trainwright.watch.run_reader import Loader, RunReader
from trainwright.watch.series import curve_json

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/watch.css": ("watch.css", "text/css; charset=utf-8"),
    "/plot.js": ("plot.js", "text/javascript; charset=utf-8"),
    "/watch.js": ("watch.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
MAX_POINTS = 20_000
"""The points of all curves in one answer; a curve has between 100 and 1500 of them."""
_MAX_NAMES = 200
_SCAN_SECONDS = 1.0
_READ_SECONDS = 30
_LEAST_COMPRESSED = 2000  # bytes


class HttpError(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.status = status


class Runs:
    """The runs that are currently below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loader = Loader()
        self._readers: dict[str, RunReader] = {}
        self._scanned = float("-inf")
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[Any, dict[str, Any]]] = {}

    def readers(self) -> dict[str, RunReader]:
        """Returns the runs by name; looks for new ones at most once per second."""
        with self._lock:
            if time.monotonic() - self._scanned > _SCAN_SECONDS:
                paths = {name_of(path, self.folder): path for path in find_runs(self.folder)}
                self._readers = {name: self._readers.get(name) or RunReader(path, name) for name, path in paths.items()}
                self._rows = {name: row for name, row in self._rows.items() if name in paths}
                self._scanned = time.monotonic()
            return self._readers

    def __getitem__(self, name: str) -> RunReader:
        try:
            return self.readers()[name]
        except KeyError:
            raise HttpError(f"There is no run {safe(name)[:200]}.", HTTPStatus.NOT_FOUND) from None

    def list(self) -> list[dict[str, Any]]:
        """Returns the state of each run, the last written first."""
        rows = [self._row(reader) for reader in self.readers().values()]
        return sorted(rows, key=lambda row: (-(row["last_write"] or 0.0), row["name"]))

    def _row(self, reader: RunReader) -> dict[str, Any]:
        version = reader.version()
        # The state also depends on the time: a run that is quiet is no longer running.
        key = (version, int(time.time() / 15))
        known = self._rows.get(reader.name)
        if known is None or known[0] != key:
            run = reader.summary()
            row = {
                "name": reader.name,
                "state": run.state.rstrip("?"),
                "step": run.step,
                "max_steps": run.max_steps,
                "saved_step": run.saved_step,
                "loss": run.loss,
                "is_finite": run.loss is None or math.isfinite(run.loss),
                "best": run.best,
                "last_write": run.last_write,
                "problems": [safe(problem) for problem in run.problems],
                "version": version,
            }
            known = self._rows[reader.name] = (key, row)
        return known[1]


def make_server(folder: Path, *, host: str = "127.0.0.1", port: int = 8080, token: str | None = None) -> HTTPServer:
    """Returns a server that listens on a port, 0 for a free one; `serve_forever` answers its requests.

    Clients need the token if there is one; without a token, only programs of this machine are answered, and `host` must
    be a local address.
    """
    check_access(host, token)

    class Handler(_Handler):
        pass

    Handler.runs, Handler.token = Runs(folder), token
    server = listen(host, port, Handler, has_threads=True)
    Handler.cookie = f"trainwright_watch_{server.server_port}"  # cookies do not depend on the port
    return server


class _Handler(BaseHTTPRequestHandler):
    """One connection; a page sends several requests through it."""

    runs: Runs
    token: str | None
    cookie: str
    timeout = _READ_SECONDS
    protocol_version = "HTTP/1.1"
    server_version = "trainwright"
    sys_version = ""

    def do_GET(self) -> None:
        """Answers files of the page, `/image` and `/api/…`."""
        try:
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            if self._answer_token(url.path, query):
                return
            self._check_access()
            if url.path in FILES:
                name, kind = FILES[url.path]
                self._send((PAGE / name).read_bytes(), kind)
            elif url.path == "/image":
                content = self.runs[query.get("run", "")].image(query.get("file", ""))
                if content is None:
                    raise HttpError("There is no image of this name.", HTTPStatus.NOT_FOUND)
                self._send(content, "image/png")
            elif url.path in _ANSWERS:
                self._send(_ANSWERS[url.path](self.runs, query).encode(), "application/json")
            else:
                raise HttpError(f"There is no {safe(url.path)[:200]}.", HTTPStatus.NOT_FOUND)
        except HttpError as error:
            self._send_error(error)
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logger.exception("The request failed.")
            with suppress(OSError):
                self._send_error(HttpError(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR))

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because a page sends requests continuously."""

    def _answer_token(self, path: str, query: dict[str, str]) -> bool:
        """Answers a URL that has the token with a cookie and a redirect to the URL without it, which can be shared."""
        if self.token is None or not is_token(query.pop("token", ""), self.token):
            return False
        self.send_response(HTTPStatus.SEE_OTHER)
        # Not an absolute URL: `//host` would lead elsewhere.
        self.send_header("Location", "/" + path.lstrip("/") + (f"?{urlencode(query)}" if query else ""))
        self.send_header("Set-Cookie", f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict")
        self.send_header("Content-Length", "0")
        self._send_security_headers()
        self.end_headers()
        return True

    def _check_access(self) -> None:
        if self.headers.get("Sec-Fetch-Site") == "cross-site" and self.headers.get("Sec-Fetch-Mode") != "navigate":
            raise HttpError("Other websites may not use this page.", HTTPStatus.FORBIDDEN)
        if self.token is None:
            if not is_loopback(self.headers.get("Host", "")):
                raise HttpError(
                    "The Host header is not this machine. Use http://127.0.0.1, or start with --token.",
                    HTTPStatus.FORBIDDEN,
                )
            return
        given = [self.headers.get("Authorization", "").removeprefix("Bearer ")]
        with suppress(CookieError):
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            given += [cookies[self.cookie].value] if self.cookie in cookies else []
        if not any(is_token(each, self.token) for each in given):
            raise HttpError(
                "The token is missing or wrong. Open the URL that trainwright watch has printed, which has ?token=….",
                HTTPStatus.UNAUTHORIZED,
            )

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == etag:
            status, content = HTTPStatus.NOT_MODIFIED, b""
        encoding = None
        if (
            len(content) > _LEAST_COMPRESSED
            and kind != "image/png"
            and "gzip" in self.headers.get("Accept-Encoding", "")
        ):
            content, encoding = gzip.compress(content, 1, mtime=0), "gzip"
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if encoding is not None:
            self.send_header("Content-Encoding", encoding)
        self.send_header("ETag", etag)
        self.send_header("Cache-Control", "no-cache")  # the browser revalidates with the ETag
        self._send_security_headers()
        self.end_headers()
        self.wfile.write(content)

    def _send_error(self, error: HttpError) -> None:
        self._send(json.dumps({"error": str(error)}).encode(), "application/json", error.status)

    def _send_security_headers(self) -> None:
        for name, value in SECURITY_HEADERS.items():
            self.send_header(name, value)


# The answers, as JSON.


def _list_runs(runs: Runs, query: Mapping[str, str]) -> str:
    return json_text({"folder": safe(str(runs.folder)), "runs": runs.list()})


def _describe_runs(runs: Runs, query: Mapping[str, str]) -> str:
    """Answers with the data for the layout of the curves of some runs."""
    return json_text({run.name: run.describe(runs.loader) for run in _chosen(runs, query)})


def _draw_curves(runs: Runs, query: Mapping[str, str]) -> str:
    """Answers the points of some names of some runs, within a range of steps."""
    names, chosen = _texts(query, "names")[:_MAX_NAMES], _chosen(runs, query)
    low, high, smoothing = _number(query, "low"), _number(query, "high"), _number(query, "smoothing") or 0.0
    wanted = int(_number(query, "points") or 600)
    parts = []
    for run in chosen:
        run.load(runs.loader)
        known = {safe(name): name for name in run.names()}
        has = [name for name in names if name in known]
        points = max(100, min(wanted, 1500, MAX_POINTS // max(1, len(chosen) * len(has))))
        drawn = [
            f"{json.dumps(name)}:{curve_json(run.curve(known[name]), points, smoothing=smoothing, low=low, high=high)}"
            for name in has
        ]
        parts.append(f"{json.dumps(run.name)}:{{{','.join(drawn)}}}")
    return f"{{{','.join(parts)}}}"


def _list_settings(runs: Runs, query: Mapping[str, str]) -> str:
    return json_text({run.name: run.settings() for run in _chosen(runs, query)})


def _about(runs: Runs, query: Mapping[str, str]) -> str:
    run = runs[query.get("run", "")]
    checkpoints = [
        {
            "step": each.step,
            "size": each.size,
            "created": None if each.created is None else each.created.timestamp(),
            "metrics": dict(each.metrics),
        }
        for each in run.checkpoints().intact
    ]
    return json_text(
        {
            "environment": run.environment(),
            "model": run.model(),
            "checkpoints": checkpoints,
            "best": run.best_checkpoint(),
            "anomalies": run.anomalies(),
            "starts": run.system().starts,
        }
    )


def _list_media(runs: Runs, query: Mapping[str, str]) -> str:
    run = runs[query.get("run", "")]
    run.load(runs.loader)
    return json_text(run.media())


def _read_log(runs: Runs, query: Mapping[str, str]) -> str:
    offset = _number(query, "offset")
    return json_text(runs[query.get("run", "")].log(None if offset is None else int(offset)))


_ANSWERS: Mapping[str, Callable[[Runs, Mapping[str, str]], str]] = {
    "/api/runs": _list_runs,
    "/api/describe": _describe_runs,
    "/api/curves": _draw_curves,
    "/api/settings": _list_settings,
    "/api/about": _about,
    "/api/media": _list_media,
    "/api/log": _read_log,
}


def _chosen(runs: Runs, query: Mapping[str, str]) -> list[RunReader]:
    """Returns the runs that a request names, without those that were deleted in the meantime."""
    known = runs.readers()
    return [known[name] for name in dict.fromkeys(_texts(query, "runs")) if name in known]


def _texts(query: Mapping[str, str], name: str) -> list[str]:
    try:
        found = json.loads(query.get(name, "[]"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise HttpError(f"{name} is not a JSON list of texts.")
    return found


def _number(query: Mapping[str, str], name: str) -> float | None:
    if name not in query:
        return None
    try:
        value = float(query[name])
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise HttpError(f"{name} is not a number.")
    return value
