"""Figures as the command line prints them: one line, a table, or JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any

from kvjax.core.reporting import readable_bytes
from kvjax.sampling.scores import TokenScore


def beyond(tokens: int) -> str:
    """A warning of a text that is too long for a model."""
    return (
        f"kvjax: warning: the text goes {tokens:,} token{'s' if tokens > 1 else ''} beyond the "
        "length that the model was trained for: what it says there may be nonsense"
    )


def one_line(found: dict[str, Any]) -> str:
    """The figures of one generation, to be read."""
    moved, drafts = len(found["moves"]), found["speculation"]
    return " · ".join(
        [
            f"{found['prompt_tokens']} prompt + {found['new_tokens']} new tokens",
            f"compile {found['compile_seconds']:.2f} s ({found['compilations']} programs)",
            f"prefill {found['prefill_seconds']:.3f} s",
            f"decode {found['decode_seconds']:.3f} s, "
            f"{found['decode_tokens_per_second']:.1f} tokens/s",
            f"cache {by_place(found['cache_bytes']) or 'none'}",
            *([f"{moved} layer{'s' if moved > 1 else ''} moved"] if moved else []),
            *([_of_drafts(drafts)] if drafts else []),
        ]
    )


def _of_drafts(found: dict[str, int]) -> str:
    return (
        f"{found['accepted']} of {found['proposed']} drafted tokens accepted, {found['saved']} of "
        f"{found['passes'] + found['saved']} passes saved"
    )


def by_place(sizes: Mapping[str, float]) -> str:
    """Bytes and where they are."""
    return ", ".join(f"{readable_bytes(size)} {place}" for place, size in sizes.items())


def table(report: dict[str, Any]) -> str:
    """A line an entry: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(f"{k.replace('_', ' '):<{width}}{_readable(v)}" for k, v in report.items())


def to_json(value: dict[str, Any]) -> str:
    """One JSON object on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def score(told: TokenScore) -> dict[str, Any]:
    """A token's log-probabilities as JSON has them, which knows no infinity."""

    def finite(x: float) -> float | None:
        return x if math.isfinite(x) else None

    likeliest = [[token, finite(x)] for token, x in told.likeliest]
    return {"logprob": finite(told.logprob), "likeliest": likeliest}


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_readable(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_readable, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
