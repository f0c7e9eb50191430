"""``kvjax generate``: text from a prompt."""

import itertools
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import drafting, guiding, options
from kvjax.cli.common import given_mesh, read, use_compilation_cache
from kvjax.cli.continuing import put_away, taken_up
from kvjax.cli.distributed import joined
from kvjax.cli.output import beyond, one_line
from kvjax.cli.progress import SOON, begun, shown
from kvjax.cli.several_texts import choices, headed
from kvjax.cli.streams import echo_json
from kvjax.core.array_folder import check_writable_folder
from kvjax.generation.options import GenerateKeywords
from kvjax.generation.results import GenerationResult, GenerationStats
from kvjax.policies.presets import parse_policy


def generate(
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file (UTF-8).")
    ] = None,
    model: options.Model = None,
    revision: options.Revision = None,
    dtype: options.Dtype = None,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 128,
    min_new_tokens: Annotated[int, typer.Option(help="No end of text before so many.")] = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    typical_p: options.TypicalP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = None,
    logit_bias: options.LogitBias = None,
    n: Annotated[int, typer.Option("--n", "-n", help="So many texts.")] = 1,
    best_of: Annotated[
        int | None, typer.Option(help="Of so many, drawn, those with the highest mean score.")
    ] = None,
    num_beams: Annotated[int, typer.Option(help="Beams of a search for the likeliest text.")] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="Of beams: above 0 favours longer texts, below 0 shorter ones.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: options.Stop = None,
    json_schema: guiding.JsonSchema = None,
    regex: guiding.Regex = None,
    choice: guiding.Choice = None,
    grammar: guiding.Grammar = None,
    draft: drafting.DraftFrom = None,
    draft_layers: drafting.DraftLayers = None,
    lookup: drafting.Lookup = False,
    max_len: Annotated[
        int | None, typer.Option(help="Tokens the cache can hold; by default what is needed.")
    ] = None,
    rotary_len: options.RotaryLen = None,
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
    distributed: options.Distributed = False,
    coordinator: options.Coordinator = None,
    processes: options.Processes = None,
    process_id: options.ProcessId = None,
    start_timeout: options.StartTimeout = 60,
    heartbeat_timeout: options.Heartbeat = 20,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Compute everything again for every token.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    load_cache: Annotated[
        Path | None,
        typer.Option(help="Go on from the text in this folder, which --save-cache wrote."),
    ] = None,
    save_cache: Annotated[
        Path | None, typer.Option(help="Keep the text's cache in this folder, for --load-cache.")
    ] = None,
    as_json: options.Json = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: each token's log-probability, and those of K likeliest."),
    ] = None,
) -> None:
    """Continue a prompt, given as text, in a file, or on standard input."""
    words = _prompt(text, prompt, file)
    _check_files(load_cache, save_cache, no_cache, chat)
    if n > 1 and save_cache is not None:
        raise ValueError(f"--save-cache keeps one text, and --n is {n}")
    if logprobs is not None and not as_json:
        raise ValueError("--logprobs are told in JSON: give --json too")
    form = guiding.given_form(json_schema, regex, choice, grammar)
    drafts = draft, draft_layers, lookup
    drafting.check_draft(*drafts)
    use_compilation_cache()
    import kvjax
    from kvjax import models

    policy = parse_policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size,
        window=window, sinks=sinks, prefetch=prefetch, memory=cache_memory,
    )  # fmt: skip
    settings: GenerateKeywords = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "typical_p": typical_p, "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size, "seed": seed, "stop": tuple(stop or ()),
        "max_len": max_len, "rotary_len": rotary_len, "cache": policy, "use_cache": not no_cache,
        "logit_bias": _biases(logit_bias or ()), "logprobs": logprobs,
        "n": n, "best_of": best_of, "num_beams": num_beams, "length_penalty": length_penalty,
    }  # fmt: skip
    with joined(
        distributed, coordinator, processes, process_id, start_timeout, heartbeat_timeout,
        (words, chat, dtype, revision, mesh, as_json, form, drafts, settings),
    ) as speaks:  # fmt: skip
        if save_cache is not None:
            check_writable_folder(save_cache)
        with shown("loading"):
            where: Any = {"dtype": dtype, "mesh": given_mesh(mesh)}
            lm = models.load(model, revision=revision, **where)
            settings["draft"] = drafting.draft_for(lm, *drafts, **where)
            settings["guide"] = guiding.guide_of(lm, form)
        entry: Any = lm.chat([{"role": "user", "content": words}]) if chat else words
        held: list[int] = []
        if load_cache is not None:
            if policy != parse_policy("static"):
                raise ValueError("the cache in --load-cache has its policy: leave --cache out")
            with shown("loading"):
                settings["cache"], held, entry = taken_up(
                    lm, load_cache, words, max_new_tokens, max_len
                )
            settings["max_len"] = None

        def keep(result: GenerationResult) -> None:
            if save_cache is not None:
                if result.cache is None:
                    raise ValueError("--save-cache: no row of this cache can be taken back so far")
                ids = lm.encode([entry])[0][0].tolist()
                put_away(lm, save_cache, result.cache, [*held, *ids, *result.tokens[0]])

        if as_json:
            with shown("reading the prompt", after=SOON):
                result = kvjax.generate(lm, [entry], **settings)
            found, *others = choices(result)
            found["stats"] = asdict(result.stats)
            if others:
                found["others"] = others
            if speaks:
                echo_json(found)
            keep(result)
            if speaks:
                _warn(result.stats)
            guiding.check_kept(result)
            return
        if n > 1 or best_of is not None:
            with shown("reading the prompt", after=SOON):
                result = kvjax.generate(lm, [entry], **settings)
            keep(result)
            if speaks:
                typer.echo(headed(result))
                typer.echo(one_line(asdict(result.stats)), err=True)
                _warn(result.stats)
            guiding.check_kept(result)
            return
        running = kvjax.stream(lm, [entry], **settings)
        for piece in itertools.chain(begun(running, "reading the prompt"), running):
            if speaks:
                typer.echo(piece.text[0], nl=False)
        keep(running.result)
        if speaks:
            typer.echo()
            typer.echo(one_line(asdict(running.result.stats)), err=True)
            _warn(running.result.stats)
        guiding.check_kept(running.result)


def _check_files(load: Path | None, save: Path | None, no_cache: bool, chat: bool) -> None:
    if no_cache and (load or save):
        raise ValueError("without a cache there is none to load or to save: leave --no-cache out")
    if chat and load:
        raise ValueError("--chat begins a conversation, and can't go on from --load-cache")


def _biases(given: Iterable[str]) -> dict[int, float]:
    """What is added to logits, by token."""
    found = {}
    for each in given:
        token, _, bias = each.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise ValueError(f"--logit-bias is TOKEN=NUMBER, as 13=-100, got {each!r}") from None
    return found


def _warn(stats: GenerationStats) -> None:
    if stats.beyond_context:
        typer.echo(beyond(stats.beyond_context), err=True)


def _prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    given = [value for value in (text, prompt, file) if value is not None]
    if len(given) > 1:
        raise ValueError("give the prompt once: as an argument, by --prompt, or by --file")
    if file is None and given not in ([], ["-"]):
        return str(given[0])
    if not given and sys.stdin.isatty():
        raise ValueError("no prompt: give a text, --file, or - to read standard input")
    return read(file).removesuffix("\n").removesuffix("\r")
