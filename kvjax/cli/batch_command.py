"""``kvjax batch``: many prompts from a file, and their texts into another."""

import json
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvjax.cli import drafting, options
from kvjax.cli.batch_files import Results
from kvjax.cli.batch_lines import numbered
from kvjax.cli.batch_running import Batch, Counts
from kvjax.cli.common import given_mesh, use_compilation_cache
from kvjax.cli.progress import parting, shown
from kvjax.cli.streams import echo_json
from kvjax.policies.presets import parse_policy

AHEAD = 4
"""Requests that the engine has at once, for each of its rows: while one ends, others wait."""
MOST_TOKENS = 4096
"""Of a text, where nobody says more: positions of a model may be many, or have no end."""
BAD = 3
"""The exit code where lines are bad."""


def batch(
    prompts: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPTS",
            help='JSON objects, one a line: {"prompt": text}, {"tokens": [ids]} or {"messages": '
            "[chat]}, with an id and the settings below where wanted; - is standard input. With "
            '"continue_final_message": true the last of the messages is continued.',
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Results, a line each, in the order in which they come: line says whose it is. "
            "Those that are there are not done again."
        ),
    ],
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
    seed: Annotated[
        int, typer.Option(help="Draws of a line go by this and its number, or by its own seed.")
    ] = 0,
    stop: options.Stop = None,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Log-probabilities of the tokens, and of so many of the likeliest."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")
    ] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Try bad lines again, mended or not.")
    ] = False,
    cache: options.Cache = "paged",
    kv_bits: options.Bits = None,
    key_bits: options.KeyBits = None,
    value_bits: options.ValueBits = None,
    group_size: options.Group = None,
    max_batch_size: Annotated[int, typer.Option(help="Texts that are written at once.")] = 8,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a prompt and its text; by default the model's positions, 4096 at most."
        ),
    ] = None,
    rotary_len: options.RotaryLen = None,
    pages: Annotated[
        int | None, typer.Option(help="Of each pool; by default what all rows can need.")
    ] = None,
    cache_memory: Annotated[
        str | None, typer.Option(help="In place of --pages: what all may take: 8GiB, 500MB.")
    ] = None,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens of a prompt read together.")] = 256,
    mesh: options.Mesh = "auto",
    draft: drafting.DraftFrom = None,
    draft_layers: drafting.DraftLayers = None,
    lookup: drafting.Lookup = False,
    as_json: options.Json = False,
) -> None:
    """Continue the prompts of a file. What was stopped goes on where it was: the same command, and
    no line is done twice."""
    drafts = draft, draft_layers, lookup
    drafting.check_draft(*drafts)
    standard = str(prompts) == "-"
    if not standard and out.exists() and prompts.exists() and prompts.samefile(out):
        raise ValueError(f"{prompts} is to be read, and can't be --out too")
    policy = parse_policy(
        cache, bits=kv_bits, key_bits=key_bits, value_bits=value_bits, group=group_size
    )
    settings: Any = {
        "max_new_tokens": max_new_tokens, "min_new_tokens": min_new_tokens,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "typical_p": typical_p, "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty,
        "no_repeat_ngram_size": no_repeat_ngram_size, "seed": seed, "stop": stop or None,
        "logprobs": logprobs,
    }  # fmt: skip
    streamed = standard or not prompts.is_file()  # a pipe can't be read twice
    with (
        nullcontext(sys.stdin.buffer) if standard else prompts.open("rb") as file,
        closing(Results(out, again=retry_errors)) as results,
    ):
        if streamed and len(results):
            raise ValueError(
                f"{out} has {len(results)} results, and only lines of a file can be gone on with"
            )
        use_compilation_cache()
        from kvjax import models
        from kvjax.engine.engine import Engine
        from kvjax.memory.limits import InferenceLimits
        from kvjax.operations.saving import fingerprint

        with shown("loading"):
            lm = models.load(model, dtype=dtype, revision=revision, mesh=given_mesh(mesh))
            length = _length(lm) if max_seq_len is None else max_seq_len
            limits = InferenceLimits(max_batch_size=max_batch_size, max_seq_len=length)
            engine = Engine(
                lm, policy, limits, pages=pages, memory=cache_memory, prefill_chunk=prefill_chunk,
                draft=drafting.draft_for(lm, *drafts, dtype=dtype, mesh=lm.mesh),
                rotary_len=rotary_len,
            )  # fmt: skip
            engine.check([0], **settings)  # what is wrong for all is told before them
            ends = lm.generation.eos_token_ids
            key = json.dumps([settings, chat, repr(policy), fingerprint(lm), ends])
        with shown("reading the lines") as say:
            run = Batch(
                engine, lm, results, settings, key=key, chat=chat, most=AHEAD * max_batch_size,
                say=say,
            )  # fmt: skip
            total = None
            if not streamed:
                total = run.check(numbered(file))
                file.seek(0)
            results.begin()
            start = time.perf_counter()
            with parting(
                lambda: _stopped(len(results) + run.counts.done + run.counts.bad, streamed)
            ):
                counts = run.run(numbered(file), total)
            seconds = time.perf_counter() - start
    found = _figures(counts, engine.stats(), seconds)
    if as_json:
        echo_json(found)
    else:
        typer.echo(_summary(found, out), err=True)
    if counts.bad or counts.bad_there:
        raise typer.Exit(BAD)


def _length(lm: Any) -> int:
    """Tokens of a prompt and its text, where nobody says more."""
    return min(lm.config.position_limit or lm.config.context or MOST_TOKENS, MOST_TOKENS)


def _figures(counts: Counts, stats: Any, seconds: float) -> dict[str, Any]:
    return {
        **asdict(counts), "cached_tokens": stats.cached_tokens, "preemptions": stats.preemptions,
        "drafted_tokens": stats.drafted_tokens, "accepted_tokens": stats.accepted_tokens,
        "seconds": seconds, "tokens_per_second": counts.new_tokens / max(seconds, 1e-9),
    }  # fmt: skip


def _summary(found: dict[str, Any], out: Path) -> str:
    """The last line of a run."""
    parts = [f"{_lines(found['done'])} done"]
    if found["there"]:
        bad = f", {found['bad_there']:,} of them bad: --retry-errors" if found["bad_there"] else ""
        parts.append(f"{found['there']:,} were there{bad}")
    parts.append(f"{found['bad']:,} bad" + (f", see error in {out}" if found["bad"] else ""))
    parts.append(
        f"{found['prompt_tokens']:,} prompt ({found['cached_tokens']:,} cached) + "
        f"{found['new_tokens']:,} new tokens"
    )
    if found["drafted_tokens"]:
        parts.append(f"{found['accepted_tokens']:,} of {found['drafted_tokens']:,} drafted")
    parts.append(f"{found['seconds']:.1f} s, {found['tokens_per_second']:.1f} tokens/s")
    return " · ".join(parts)


def _stopped(done: int, streamed: bool) -> str:
    """The last line of a run that is interrupted."""
    more = "put the lines into a file to go on" if streamed else "the same command goes on"
    return f"kvjax: stopped with {_lines(done)} done: {more}"


def _lines(count: int) -> str:
    return f"{count:,} line{'' if count == 1 else 's'}"
