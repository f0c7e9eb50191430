"""``kvjax chat``: a conversation in the terminal, or line by line from a file."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.chats.rendering import PLAIN
from kvjax.cli import options
from kvjax.cli.chat_loop import ChatLoop
from kvjax.cli.common import mesh_from_option, read_text, use_compilation_cache
from kvjax.cli.interrupts import raise_interrupts
from kvjax.cli.options import cache_policy
from kvjax.cli.progress import show_progress
from kvjax.core.array_folder import expand_user
from kvjax.policies.presets import parse_policy


def chat(
    *,
    model: options.ModelOptions,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="A file with a chat template (Jinja), or plain for none; by default the "
            "checkpoint's template."
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Continue the chat in this folder, which /save wrote.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer, at most; by default 512.")
    ] = None,
    sampling: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers.")] = None,
    stop: options.Stop = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the chat, at most; by default the length that the model was trained "
            "for, up to 4096."
        ),
    ] = None,
    on_full: Annotated[
        str | None,
        typer.Option(help="When the chat is full: stop (the default), or drop the oldest turns."),
    ] = None,
    cache: options.Cache = "static",
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    offloading: options.Offloading,
    mesh: options.Mesh = "auto",
    drafting: options.Drafting,
) -> None:
    """Chat with a model; /help lists the commands of a chat."""
    policy = cache_policy(cache, quantization, sliding_window, offloading)
    if load is not None and policy != parse_policy("static"):
        raise ValueError("--load uses the policy of the saved chat: omit --cache")
    if template not in (None, PLAIN):
        template = read_text(expand_user(template))
    settings: dict[str, Any] = {
        "system": system,
        "template": template,
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "stop": stop or None,
        "max_len": max_len,
        "on_full": on_full,
    }
    # A saved chat keeps its settings, except those that are given.
    settings = {name: value for name, value in settings.items() if value is not None} | sampling
    drafting.check()
    use_compilation_cache()
    import kvjax

    with show_progress("loading"):
        devices = mesh_from_option(mesh)
        lm = model.load(devices)
        if drafting.given:
            settings["draft"] = drafting.load(lm, devices, model.dtype)
        if load is None:
            chat = kvjax.Chat(lm, cache=policy, **settings)
        else:
            chat = kvjax.Chat.load(lm, load, **settings)
    loop = ChatLoop(chat, interactive=sys.stdin.isatty())
    with raise_interrupts():
        loop.run()
    if loop.failed and not loop.interactive:
        raise typer.Exit(2)
