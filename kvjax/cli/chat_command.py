"""``kvjax chat``: a conversation in the terminal, or line by line from a file."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.chats.rendering import PLAIN
from kvjax.cli import drafting, options
from kvjax.cli.chat_loop import Talk
from kvjax.cli.common import given_mesh, read, use_compilation_cache
from kvjax.cli.progress import raised, shown
from kvjax.core.array_folder import expand_user
from kvjax.policies.presets import parse_policy


def chat(
    model: options.Model = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    template: Annotated[
        str | None,
        typer.Option(
            help="A file with a chat template (Jinja), or plain for none; by default the "
            "checkpoint's."
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option(help="Go on with the chat in this folder, which /save wrote.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="An answer ends after so many tokens; by default 512.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="By default 0, which takes the likeliest token.")
    ] = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: Annotated[int | None, typer.Option(help="The same seed, the same answers.")] = None,
    stop: options.Stop = None,
    max_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens the chat can have; by default what the model is trained for, at most 4096."
        ),
    ] = None,
    on_full: Annotated[
        str | None,
        typer.Option(help="When there is no room: stop (the default), or drop the oldest turns."),
    ] = None,
    cache: options.Cache = "static",
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    window: options.Window = None,
    sinks: options.Sinks = None,
    prefetch: options.Prefetch = None,
    cache_memory: options.CacheMemory = None,
    mesh: options.Mesh = "auto",
    draft: drafting.DraftFrom = None,
    draft_layers: drafting.DraftLayers = None,
    lookup: drafting.Lookup = False,
) -> None:
    """Talk with a model, turn by turn on one cache; /help lists what else there is."""
    policy = parse_policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size,
        window=window, sinks=sinks, prefetch=prefetch, memory=cache_memory,
    )  # fmt: skip
    if load is not None and policy != parse_policy("static"):
        raise ValueError("the chat in --load has its cache and its policy: leave --cache out")
    if template not in (None, PLAIN):
        template = read(expand_user(template))
    given: dict[str, Any] = {
        "system": system, "template": template,
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty, "seed": seed,
        "stop": stop or None, "max_len": max_len, "on_full": on_full,
    }  # fmt: skip
    # What was saved with a chat stays as it is, but for what is asked for.
    given = {name: value for name, value in given.items() if value is not None}
    drafts = draft, draft_layers, lookup
    drafting.check_draft(*drafts)
    use_compilation_cache()
    import kvjax
    from kvjax import models

    with shown("loading"):
        where: Any = {"dtype": dtype, "mesh": given_mesh(mesh)}
        lm = models.load(model, revision=revision, **where)
        if any(drafts):
            given["draft"] = drafting.draft_for(lm, *drafts, **where)
        if load is None:
            chat = kvjax.Chat(lm, cache=policy, **given)
        else:
            chat = kvjax.Chat.load(lm, load, **given)
    talk = Talk(chat, alone=not sys.stdin.isatty())
    with raised():
        talk.run()
    if talk.failed and talk.alone:
        raise typer.Exit(2)
