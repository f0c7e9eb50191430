"""``kvjax serve``: an HTTP server compatible with OpenAI's API."""

import asyncio
import importlib.util
import signal
from typing import Annotated

import typer

from kvjax.cli import options
from kvjax.cli.common import INTERRUPTED, exit_now, mesh_from_option, use_compilation_cache
from kvjax.cli.options import cache_policy
from kvjax.cli.output import show_progress
from kvjax.core.array_folder import expand_user
from kvjax.core.reporting import parse_bytes

DEFAULT_MAX_LEN = 4096
"""The maximum number of tokens of a sequence, unless ``--max-seq-len`` is given."""


def serve(
    *,
    model: options.ModelOptions,
    mesh: options.Mesh = "auto",
    served_model_name: Annotated[
        str | None,
        typer.Option(help="The model's name in requests; by default that of --model."),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port to listen on; 0 chooses a free one.", min=0, max=65535)
    ] = 8000,
    cache: options.Cache = "paged",
    quantization: options.Quantization,
    size: options.EngineOptions,
    host_memory: Annotated[
        str, typer.Option(help="Host memory for waiting requests and cached prefixes.")
    ] = "1GiB",
    drafting: options.Drafting,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="KVJAX_API_KEY", help="A key that clients may send; may be repeated."),
    ] = None,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes", help="Share cached prefixes between clients with different keys."
        ),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A site whose pages may send requests: https://example.org; may be repeated."
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait while others run.", min=0)
    ] = 64,
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "4MiB",
    client_timeout: Annotated[
        float,
        typer.Option(help="Seconds that a client may take to send a request or read a response."),
    ] = 30.0,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds to finish accepted requests at shutdown.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    check_installed()
    drafting.check()
    from kvjax.serve.auth import is_loopback
    from kvjax.serve.server import Server, bind, url_of
    from kvjax.serve.state import ServerSettings

    settings = ServerSettings(
        name=served_model_name or _model_name(model.model),
        api_keys=tuple(api_key or ()),
        share_prefixes=share_prefixes,
        allowed_origins=tuple(allow_origin or ()),
        max_sequences=size.max_batch_size + max_queue,
        max_body=parse_bytes(max_body),
        client_timeout=client_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    policy = cache_policy(cache, quantization)
    use_compilation_cache()
    with bind(host, port) as listener:
        with show_progress("loading"):
            lm = model.load(mesh_from_option(mesh))
            engine = size.engine(
                lm,
                policy,
                min(lm.config.position_limit or DEFAULT_MAX_LEN, DEFAULT_MAX_LEN),
                host_memory=host_memory,
                draft=drafting.load(lm, lm.mesh, model.dtype),
            )
        with show_progress("compiling"):
            engine.compile()
        url = url_of(listener)

        def on_ready() -> None:
            if not settings.api_keys and not is_loopback(host):
                message = "kvjax: warning: anyone who can reach this address can use the server"
                typer.echo(f"{message}; require a key with --api-key", err=True)
            typer.echo(f"kvjax: serving {settings.name} at {url}", err=True)

        server = Server(engine, lm, settings)
        signals = signal.SIGTERM, signal.SIGINT
        asyncio.run(server.run(listener, on_ready, signals, lambda: exit_now(INTERRUPTED)))


def check_installed() -> None:
    """Raise ``ValueError`` if a package is missing that the server needs."""
    packages = "starlette", "uvicorn", "prometheus_client", "llguidance"
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise ValueError(f'serving needs {missing[0]}: pip install "kvjax[serve]"')


def _model_name(model: str | None) -> str:
    if model is None:
        return "kvjax-tiny"
    folder = expand_user(model)
    return folder.resolve().name if folder.is_dir() else model
