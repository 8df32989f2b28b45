"""`trainwright serve RUN`: answers requests of OpenAI's API with the model of a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from trainwright.commands.terminal import (
    CheckpointStep,
    DeviceChoice,
    ModelPath,
    TokenizerChoice,
    Trust,
    Weights,
)


def serve(
    run: ModelPath,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 for a free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen on. An address other than this machine's own requires --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(help="The API key of clients.", envvar="TRAINWRIGHT_SERVE_TOKEN", show_default="none"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The name of the model in requests.", show_default="that of the folder")
    ] = None,
    step: CheckpointStep = "latest",
    weights: Weights = None,
    tokenizer: TokenizerChoice = None,
    device: DeviceChoice = "auto",
    trust: Trust = False,
) -> None:
    """Serve the model of a run over HTTP for trying it: /v1/chat/completions, /v1/completions and /v1/models.

    Requests are those of OpenAI's API, with and without streaming, and are answered one at a time.
    """
    from trainwright.backends.backend import pick_backend
    from trainwright.export.chat import chat_format, find_chat_template
    from trainwright.export.server import ServedModel, make_server
    from trainwright.export.text import load_text_model
    from trainwright.http_access import check_access, url_host

    check_access(host, token)  # before the model is loaded
    backend_device = pick_backend(device).device
    model, found = load_text_model(
        run, step=step, weights=weights, device=backend_device, tokenizer=tokenizer, trust=trust
    )
    served = ServedModel(
        name=name or run.resolve().name,
        model=model,
        format=chat_format(found, find_chat_template(run, trust=trust)),
        device=backend_device,
        created=int(time.time()),
    )
    with make_server(served, host=host, port=port, token=token) as server:
        print(f"Serving {served.name} at http://{url_host(host)}:{server.server_port}/v1. Ctrl-C ends.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
