"""Figures as the command line prints them: one line, a table, or JSON."""

import json
from dataclasses import asdict
from typing import Any

from kvjax.core.sizes import readable_bytes
from kvjax.generation.statistics import GenerationStats

FIGURES = (
    "prompt_tokens", "new_tokens", "compile_seconds", "prefill_seconds", "decode_seconds",
    "decode_tokens_per_second", "cache_bytes", "compilations",
)  # fmt: skip


def figures(stats: GenerationStats) -> dict[str, Any]:
    """What the command line shows of a generation's stats, by name."""
    found = {name: getattr(stats, name) for name in FIGURES}
    return found | {"moves": [asdict(move) for move in stats.moves]}


def one_line(found: dict[str, Any]) -> str:
    """The figures of one generation, to be read."""
    moved = len(found["moves"])
    places = [f"{readable_bytes(n)} {place}" for place, n in found["cache_bytes"].items()]
    return " · ".join(
        [
            f"{found['prompt_tokens']} prompt + {found['new_tokens']} new tokens",
            f"compile {found['compile_seconds']:.2f} s ({found['compilations']} programs)",
            f"prefill {found['prefill_seconds']:.3f} s",
            f"decode {found['decode_seconds']:.3f} s, "
            f"{found['decode_tokens_per_second']:.1f} tokens/s",
            f"cache {', '.join(places) or 'none'}",
            *([f"{moved} layer{'s' if moved > 1 else ''} moved"] if moved else []),
        ]
    )


def table(report: dict[str, Any]) -> str:
    """A line an entry: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(f"{k.replace('_', ' '):<{width}}{_readable(v)}" for k, v in report.items())


def to_json(value: dict[str, Any]) -> str:
    """One JSON object on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_readable(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_readable, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
