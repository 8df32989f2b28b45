"""Access control for a server on this machine: local programs, and clients that send a token.

Shared by `trainwright serve` (export/server.py) and `trainwright watch` (watch/server.py).
"""

from __future__ import annotations

import hmac
import socket
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer

from trainwright.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""The addresses that only programs of this machine can reach."""


def check_access(host: str, token: str | None) -> None:
    """Rejects an address that other machines can reach without a token, and a token that a header cannot carry."""
    if token is None and host not in LOOPBACK:
        raise ConfigError(
            f"--host {host} is reachable from other machines. Set a token, which clients send: --token, or the "
            "variable that --help names."
        )
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("--token must be printable ASCII text without spaces.")


def is_token(given: str, token: str) -> bool:
    """Compares in constant time, so the time does not reveal how much of a guess is right."""
    return hmac.compare_digest(given.encode(), token.encode())


def is_loopback(host_header: str) -> bool:
    """Returns True for a Host header of this machine.

    Otherwise, a website whose name resolves to this machine could read responses from a browser.
    """
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0] in LOOPBACK
    return host_header.partition(":")[0].lower() in LOOPBACK


def listen(host: str, port: int, handler: type[BaseHTTPRequestHandler], *, has_threads: bool = False) -> HTTPServer:
    """Returns a server that listens on a port, 0 for a free one; `has_threads` answers requests concurrently."""
    kind: type[HTTPServer] = ThreadingHTTPServer if has_threads else HTTPServer
    if ":" in host:
        kind = type("IPv6Server", (kind,), {"address_family": socket.AF_INET6})
    try:
        return kind((host, port), handler)
    except OSError as error:
        raise ConfigError(f"The server cannot listen on {host}:{port}: {error}. Choose another --port.") from error


def url_host(host: str) -> str:
    """Returns a host as URLs write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
