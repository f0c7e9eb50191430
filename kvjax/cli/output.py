"""What commands print: statistics, tables, JSON, and standard streams that can show them."""

import io
import json
import math
import os
import sys
from collections.abc import Mapping

import typer

from kvjax.core.reporting import readable_bytes
from kvjax.generation.results import GenerationResult, GenerationStats
from kvjax.sampling.scores import TokenScore


def prepare_streams() -> None:
    """Make the standard streams independent of the locale.

    Characters that the console can't show are printed as escapes. Input from a file or a pipe is
    read as UTF-8. Closed streams are replaced by the null device.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def to_json(value: Mapping[str, object]) -> str:
    """A JSON object on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def echo_json(value: Mapping[str, object]) -> None:
    """Print a JSON object on one line.

    Where the console lacks a character, all are written as JSON's escapes: the stream's own
    escapes would not be valid JSON.
    """
    text = to_json(value)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    typer.echo(text)


def context_warning(tokens: int) -> str:
    """The warning for a text that is ``tokens`` longer than the model was trained for."""
    return (
        f"kvjax: warning: the text is {tokens:,} token{'s' if tokens > 1 else ''} longer than the "
        "model was trained for: the output may be nonsense"
    )


def stats_line(stats: GenerationStats) -> str:
    """The statistics of one generation, on one line."""
    moves, speculation = len(stats.moves), stats.speculation
    parts = [
        f"{stats.prompt_tokens} prompt + {stats.new_tokens} new tokens",
        f"compile {stats.compile_seconds:.2f} s ({stats.compilations} programs)",
        f"prefill {stats.prefill_seconds:.3f} s",
        f"decode {stats.decode_seconds:.3f} s, {stats.decode_tokens_per_second:.1f} tokens/s",
        f"cache {bytes_by_place(stats.cache_bytes) or 'none'}",
    ]
    if moves:
        parts.append(f"{moves} layer{'s' if moves > 1 else ''} moved")
    if speculation is not None:
        passes = speculation.passes + speculation.saved
        parts.append(
            f"{speculation.accepted} of {speculation.proposed} drafted tokens accepted, "
            f"{speculation.saved} of {passes} passes saved"
        )
    return " · ".join(parts)


def bytes_by_place(sizes: Mapping[str, float]) -> str:
    """Sizes in bytes and their places: ``1.5 MB device, 3 MB host``."""
    return ", ".join(f"{readable_bytes(size)} {place}" for place, size in sizes.items())


def format_table(report: Mapping[str, object]) -> str:
    """A table with a line for each entry: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(f"{k.replace('_', ' '):<{width}}{_format(v)}" for k, v in report.items())


def _format(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def texts_as_json(result: GenerationResult) -> list[dict[str, object]]:
    """The texts of one prompt as JSON objects, with their scores."""
    texts: list[dict[str, object]] = []
    for row, (text, tokens) in enumerate(zip(result.text, result.tokens, strict=True)):
        entry: dict[str, object] = {"text": text, "tokens": tokens}
        if result.sequence_scores is not None:
            entry["sequence_score"] = _finite(result.sequence_scores[row])
        if result.logprobs is not None:
            entry["logprobs"] = [score_as_json(score) for score in result.logprobs[row]]
        texts.append(entry)
    return texts


def texts_with_headings(result: GenerationResult) -> str:
    """The texts of one prompt, each after a line with its number and score."""
    parts = []
    for row, text in enumerate(result.text):
        scores = result.sequence_scores
        score = "" if scores is None else f" ({scores[row]:.4f})"
        parts.append(f"--- {row + 1}{score}\n{text}")
    return "\n".join(parts)


def score_as_json(score: TokenScore) -> dict[str, object]:
    """A token's log-probabilities as a JSON object."""
    likeliest = [[token, _finite(logprob)] for token, logprob in score.top_logprobs]
    return {"logprob": _finite(score.logprob), "top_logprobs": likeliest}


def _finite(number: float) -> float | None:
    """A number, or None for an infinity, which JSON can't represent."""
    return number if math.isfinite(number) else None
