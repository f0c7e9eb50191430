"""``kvjax generate``: continue a prompt."""

import itertools
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvjax.cache.state import KVCache
from kvjax.cli import options
from kvjax.cli.common import mesh_from_option, read_text, use_compilation_cache
from kvjax.cli.distributed import DistributedOptions, join_processes
from kvjax.cli.options import cache_policy, check_guides, make_guide
from kvjax.cli.output import (
    SHORT_DELAY,
    context_warning,
    echo_json,
    first_pieces,
    show_progress,
    stats_line,
    texts_as_json,
    texts_with_headings,
)
from kvjax.core.array_folder import check_writable_folder
from kvjax.core.transfer import fetch
from kvjax.core.validation import UNLIMITED, CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import capacity_bucket
from kvjax.generation.options import GenerateKeywords
from kvjax.generation.results import GenerationResult, GenerationStats
from kvjax.operations.saving import load_cache, save_cache
from kvjax.policies.model_config import positions_needed
from kvjax.policies.presets import parse_policy


def generate(
    *,
    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file (UTF-8).")
    ] = None,
    model: options.ModelOptions,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many new tokens.")] = 128,
    sampling: options.SamplingOptions,
    logit_bias: options.LogitBias = None,
    n: Annotated[int, typer.Option("--n", "-n", help="Number of texts.")] = 1,
    best_of: Annotated[
        int | None,
        typer.Option(help="Sample this many texts, and return those with the best mean score."),
    ] = None,
    num_beams: Annotated[
        int, typer.Option(help="Beams of a search for the likeliest text; 1 for no search.")
    ] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="Of a beam search: above 0 favors long texts, below 0 short ones.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    stop: options.Stop = None,
    grammar_options: options.GrammarOptions,
    drafting: options.Drafting,
    max_len: Annotated[
        int | None, typer.Option(help="Tokens the cache can hold; by default as many as needed.")
    ] = None,
    rotary_len: options.RotaryLen = None,
    cache: options.Cache = "static",
    quantization: options.Quantization,
    sliding_window: options.SlidingWindow,
    offloading: options.Offloading,
    mesh: options.Mesh = "auto",
    processes: DistributedOptions,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute the whole text for every token.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")
    ] = False,
    load_cache: Annotated[
        Path | None,
        typer.Option(help="Continue the text in this folder, which --save-cache wrote."),
    ] = None,
    save_cache: Annotated[
        Path | None, typer.Option(help="Save the text and its cache in this folder.")
    ] = None,
    as_json: options.Json = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log-probabilities of the tokens and the K likeliest."),
    ] = None,
) -> None:
    """Continue a prompt, given as an argument, in a file, or on standard input."""
    prompt_text = _read_prompt(text, prompt, file)
    _check_options(load_cache, save_cache, no_cache, chat)
    if n > 1 and save_cache is not None:
        raise ValueError(f"--save-cache saves a single text, but --n is {n}")
    if logprobs is not None and not as_json:
        raise ValueError("--logprobs needs --json")
    grammar = grammar_options.read()
    drafting.check()
    use_compilation_cache()
    import kvjax

    policy = cache_policy(cache, quantization, sliding_window, offloading)
    settings: GenerateKeywords = {
        "max_new_tokens": max_new_tokens,
        **cast(GenerateKeywords, sampling),
        "logit_bias": _parse_logit_bias(logit_bias or ()),
        "logprobs": logprobs,
        "n": n,
        "best_of": best_of,
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "seed": seed,
        "stop": tuple(stop or ()),
        "max_len": max_len,
        "rotary_len": rotary_len,
        "cache": policy,
        "use_cache": not no_cache,
    }
    shared = prompt_text, chat, model.dtype, model.revision, mesh, as_json, grammar, drafting
    with join_processes(processes, (shared, settings)) as prints:
        if save_cache is not None:
            check_writable_folder(save_cache)
        with show_progress("loading"):
            devices = mesh_from_option(mesh)
            lm = model.load(devices)
            settings["draft"] = drafting.load(lm, devices, model.dtype)
            settings["guide"] = make_guide(lm, grammar)
        entry: Any = prompt_text
        if chat:
            entry = lm.chat([{"role": "user", "content": prompt_text}])
        cached_tokens: list[int] = []
        if load_cache is not None:
            if policy != parse_policy("static"):
                raise ValueError("--load-cache uses the policy of the saved cache: omit --cache")
            with show_progress("loading"):
                settings["cache"], cached_tokens, entry = _load_text(
                    lm, load_cache, prompt_text, max_new_tokens, max_len
                )
            settings["max_len"] = None

        def save(result: GenerationResult) -> None:
            if save_cache is not None:
                if result.cache is None:
                    raise ValueError("--save-cache: the cache can't be rewound to the text's end")
                prompt_tokens = lm.encode([entry])[0][0].tolist()
                tokens = [*cached_tokens, *prompt_tokens, *result.tokens[0]]
                _save_text(lm, save_cache, result.cache, tokens)

        if as_json:
            with show_progress("reading the prompt", after=SHORT_DELAY):
                result = kvjax.generate(lm, [entry], **settings)
            report, *others = texts_as_json(result)
            report["stats"] = asdict(result.stats)
            if others:
                report["others"] = others
            if prints:
                echo_json(report)
            save(result)
        elif n > 1 or best_of is not None:
            with show_progress("reading the prompt", after=SHORT_DELAY):
                result = kvjax.generate(lm, [entry], **settings)
            save(result)
            if prints:
                typer.echo(texts_with_headings(result))
                typer.echo(stats_line(result.stats), err=True)
        else:
            stream = kvjax.stream(lm, [entry], **settings)
            for piece in itertools.chain(first_pieces(stream, "reading the prompt"), stream):
                if prints:
                    typer.echo(piece.text[0], nl=False)
            result = stream.result
            save(result)
            if prints:
                typer.echo()
                typer.echo(stats_line(result.stats), err=True)
        if prints:
            _warn(result.stats)
        check_guides(result)


def _read_prompt(text: str | None, prompt: str | None, file: Path | None) -> str:
    sources = [value for value in (text, prompt, file) if value is not None]
    if len(sources) > 1:
        raise ValueError("give the prompt once: as an argument, by --prompt, or by --file")
    if file is None and sources not in ([], ["-"]):
        return str(sources[0])
    if not sources and sys.stdin.isatty():
        raise ValueError("no prompt: give a text, --file, or - to read standard input")
    return read_text(file).removesuffix("\n").removesuffix("\r")


def _check_options(load: Path | None, save: Path | None, no_cache: bool, chat: bool) -> None:
    if no_cache and (load or save):
        raise ValueError("--no-cache leaves no cache to load or save: omit one of the options")
    if chat and load:
        raise ValueError("--chat starts a conversation, and can't continue one of --load-cache")


def _parse_logit_bias(options: Iterable[str]) -> dict[int, float]:
    """Parse the values of ``--logit-bias``. Returns the bias of each token."""
    biases = {}
    for option in options:
        token, _, bias = option.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            message = f"--logit-bias must be TOKEN=NUMBER, such as 13=-100, got {option!r}"
            raise ValueError(message) from None
    return biases


def _warn(stats: GenerationStats) -> None:
    if stats.beyond_context:
        typer.echo(context_warning(stats.beyond_context), err=True)


def _load_text(
    lm: LanguageModel, folder: Path, prompt: str, max_new_tokens: int, max_len: int | None
) -> tuple[KVCache, list[int], list[int]]:
    """Load a saved text, and make room for ``prompt`` and ``max_new_tokens`` more tokens after it.

    Returns:
      The cache, the tokens in the cache, and the tokens to prefill.

    Raises:
      CheckpointError: if ``--save-cache`` did not write the folder for this model.
      ValueError: if the cache has more than ``max_len`` tokens.
    """
    cache, texts = load_cache(folder, model=lm, max_len=max_len)
    if texts is None or len(texts) != 1:
        raise CheckpointError(
            f"{folder}: has {len(texts or ())} texts; --load-cache needs a folder with one text, "
            "written by --save-cache"
        )
    (tokens,) = texts
    length = int(fetch(cache.length)[0])
    new_tokens = tokens[length:] + lm.tokenizer.encode(prompt, add_special_tokens=not tokens)
    needed = positions_needed(length + len(new_tokens), max_new_tokens)
    capacity = max(cache.max_len, cache.grows_to or 0)
    if max_len is None and needed > capacity < UNLIMITED:
        limit = cache.positions or UNLIMITED
        max_len = min(capacity_bucket(needed), max(limit, capacity))
    if lm.mesh is not None or max_len is not None:
        cache, _ = load_cache(folder, model=lm, max_len=max_len, mesh=lm.mesh)
    return cache, tokens[:length], new_tokens


def _save_text(lm: LanguageModel, folder: Path, cache: KVCache, tokens: list[int]) -> None:
    """Save the cache of one text, and all tokens of the text."""
    if cache.batch != 1:
        raise ValueError(
            f"--save-cache saves one row, but the cache has {cache.batch} on this mesh: give a "
            "mesh with data=1"
        )
    save_cache(folder, cache, model=lm, tokens=[tokens])
