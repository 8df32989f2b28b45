"""`trainwright watch [DIR]`: a live page of all runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.errors import TrainwrightError


def watch(
    folder: Annotated[Path, typer.Argument(help="The folder of the run folders.", metavar="DIR")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8080,
    host: Annotated[
        str, typer.Option(help="The address to listen on. An address other than this machine's own requires a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            help="The token that browsers send in the URL.",
            envvar="TRAINWRIGHT_WATCH_TOKEN",
            show_default="none on this machine, otherwise a random one",
        ),
    ] = None,
) -> None:
    """Show all runs below a folder on a live page: curves, media, settings and logs. Only reads."""
    import secrets

    from trainwright.http_access import LOOPBACK, url_host
    from trainwright.watch.server import make_server

    if folder.exists() and not folder.is_dir():
        raise TrainwrightError(f"{folder} is a file. Pass a folder of runs, such as trainwright watch runs.")
    if token is None and host not in LOOPBACK:
        token = secrets.token_urlsafe(24)
    with make_server(folder, host=host, port=port, token=token) as server:
        query = "" if token is None else f"/?token={token}"
        print(f"Watching {folder} at http://{url_host(host)}:{server.server_port}{query} (Ctrl-C ends)", flush=True)
        if not folder.exists():
            print(f"{folder} does not exist yet; its runs appear when they start.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
