"""``kvjax serve``: an engine behind HTTP."""

import asyncio
import signal
from typing import Annotated, Any

import typer

from kvjax.cli import drafting, options
from kvjax.cli.common import given_mesh, use_compilation_cache
from kvjax.cli.progress import INTERRUPTED, leave, shown
from kvjax.core.array_folder import expand_user
from kvjax.core.reporting import parse_bytes
from kvjax.policies.presets import parse_policy

MOST_TOKENS = 4096
"""Of a text, where nobody says more: positions of a model may be many, or have no end."""


def serve(
    model: options.Model = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    mesh: options.Mesh = "auto",
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default as it is given.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is a free one.", min=0, max=65535)] = 8000,
    cache: options.Cache = "paged",
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    max_batch_size: Annotated[int, typer.Option(help="Choices that run at once.", min=1)] = 8,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and new text; by default the model's positions, 4096 at most.",
            min=2,
        ),
    ] = None,
    rotary_len: options.RotaryLen = None,
    pages: Annotated[
        int | None, typer.Option(help="Of each pool; by default what all rows can need.", min=1)
    ] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="In place of --pages: what all may take: 8GiB, 500MB.")
    ] = None,
    host_memory: Annotated[
        str, typer.Option(help="Of the host's, for those who wait, and for prefixes.")
    ] = "1GiB",
    prefill_chunk: Annotated[
        int, typer.Option(help="Tokens of a prompt that are computed together.", min=1)
    ] = 256,
    draft: drafting.DraftFrom = None,
    draft_layers: drafting.DraftLayers = None,
    lookup: drafting.Lookup = False,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="KVJAX_API_KEY", help="A key that clients must send; may be repeated."),
    ] = None,
    share_prefixes: Annotated[
        bool,
        typer.Option("--share-prefixes", help="Those with different keys share prefixes too."),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="A site whose pages may ask, https://example.org; may be repeated."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Choices that may wait beside those that run.", min=0)
    ] = 64,
    max_body: Annotated[str, typer.Option(help="Bytes of a request.")] = "4MiB",
    patience: Annotated[
        float, typer.Option(help="Seconds that a client may take to send, or to read.")
    ] = 30.0,
    grace: Annotated[
        float, typer.Option(help="Seconds that those who were accepted have, at the end.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP, as OpenAI's clients ask for it."""
    from kvjax.serve.needed import check_installed

    check_installed()
    drafts = draft, draft_layers, lookup
    drafting.check_draft(*drafts)
    from kvjax.serve.auth import loopback
    from kvjax.serve.server import Server, address_of, bound
    from kvjax.serve.settings import Settings

    settings = Settings(
        name=name or _name(model),
        keys=tuple(api_key or ()), share_prefixes=share_prefixes,
        origins=tuple(allow_origin or ()),
        places=max_batch_size + max_queue, max_body=parse_bytes(max_body), patience=patience,
        grace=grace,
    )  # fmt: skip
    policy = parse_policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group_size=group_size
    )
    use_compilation_cache()
    with bound(host, port) as listener:
        import kvjax
        from kvjax import models

        with shown("loading"):
            lm = models.load(model, dtype=dtype, revision=revision, mesh=given_mesh(mesh))
            limits = kvjax.memory.InferenceLimits(
                max_batch_size=max_batch_size, max_seq_len=max_seq_len or _positions(lm)
            )
            engine = kvjax.Engine(
                lm, policy, limits, pages=pages, memory=cache_memory, prefill_chunk=prefill_chunk,
                host_memory=host_memory, rotary_len=rotary_len,
                draft=drafting.draft_for(lm, *drafts, dtype=dtype, mesh=lm.mesh),
            )  # fmt: skip
        with shown("compiling"):
            engine.compile()
        address = address_of(listener)

        def ready() -> None:
            if not settings.keys and not loopback(host):
                typer.echo("kvjax: whoever reaches this address may use it: --api-key", err=True)
            typer.echo(f"kvjax: serving {settings.name} at {address}", err=True)

        asyncio.run(
            Server(engine, lm, settings).run(
                listener, ready, (signal.SIGTERM, signal.SIGINT), lambda: leave(INTERRUPTED)
            )
        )


def _name(model: str | None) -> str:
    if model is None:
        return "kvjax-tiny"
    folder = expand_user(model)
    return folder.resolve().name if folder.is_dir() else model


def _positions(lm: Any) -> int:
    return min(lm.config.position_limit or MOST_TOKENS, MOST_TOKENS)
