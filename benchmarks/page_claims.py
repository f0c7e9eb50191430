"""The figures of README and user pages, made from the files of results: ``python -m
benchmarks.page_claims`` lists each with its file, and fails if a page says something else."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from benchmarks.claims import is_eager

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEED = "amd-epyc-jax0.12.0.1/decode.json"
POLICIES = "quality/held_out-policies.json"
TRANSFORMERS, LLAMA_CPP = "quality/held_out-transformers.json", "quality/held_out-llama_cpp.json"
README, QUANTIZATION = "README.md", "docs/quantization.md"

CELLS = ((1, 64), (1, 2048), (1, 8192), (8, 64), (8, 2048))


@dataclass(frozen=True)
class PageClaim:
    """A text of a page, such as a row of a table, and the file that its figures come from."""

    page: str
    text: str
    file: str

    @property
    def holds(self) -> bool:
        """Whether the page has the text, however its lines are broken."""
        page = " ".join((ROOT / self.page).read_text(encoding="utf-8").split())
        return " ".join(self.text.split()) in page


def _load(file: str) -> Any:
    return json.loads((RESULTS / file).read_text(encoding="utf-8"))


def all_page_claims() -> list[PageClaim]:
    """Every figure that is traced to a file."""
    return [*_speed(), *_quality(), *_peers()]


def _speed() -> Iterator[PageClaim]:
    cells = {
        (cell["batch"], cell["prompt"]): cell["engines"]
        for cell in _load(SPEED)["cells"]
        if cell["dtype"] == "float32"
    }

    def step(engines: dict[str, Any], name: str) -> float:
        return engines[name]["milliseconds_per_token"]

    for batch, prompt in CELLS:
        engines = cells[batch, prompt]
        theirs = min(step(engines, name) for name in engines if is_eager(name))
        uncached = 1e3 * statistics.median(engines["kvjax"]["uncached_seconds"])
        figures = (step(engines, "kvjax"), theirs, uncached)
        text = " | ".join(f"{decimal(figure):,}" for figure in figures)
        yield PageClaim(README, f"| {batch} × {prompt:,} | {text} |", SPEED)
    one, eight = (step(cells[rows, 64], "llama_cpp-f16") for rows in (1, 8))
    text = f"at 64 tokens ({decimal(one)} ms with one row, {decimal(eight)} ms with eight)"
    yield PageClaim(README, text, SPEED)


def _quality() -> Iterator[PageClaim]:
    found = _load(POLICIES)
    for name in ("bits=8", "bits=4", "bits=2"):
        yield PageClaim(README, quality_row(f"`{name}`", found[name]), POLICIES)
    for name in ("bits=8", "bits=4", "bits=3", "key_bits=4,value_bits=2", "bits=2", "bits=1"):
        label = f"`{name.replace(',', ', ')}`"
        yield PageClaim(QUANTIZATION, quality_row(label, found[name]), POLICIES)


def _peers() -> Iterator[PageClaim]:
    theirs, llama_cpp = _load(TRANSFORMERS), _load(LLAMA_CPP)
    for file, found in ((TRANSFORMERS, theirs), (LLAMA_CPP, llama_cpp)):
        for name, each in found.items():
            if not name.startswith("kvjax") and "q5" not in name:
                yield PageClaim(QUANTIZATION, quality_row(name, each), file)
    ours = theirs["kvjax bits=4"]["overall"]["mean_kl"]
    ratios = sorted(
        each["overall"]["mean_kl"] / ours for name, each in theirs.items() if " 4 bits" in name
    )
    span = f"{decimal(ratios[0])} to {decimal(ratios[-1])}"
    text = f"{span} times as large with Transformers' quanto and HQQ"
    yield PageClaim(README, text, TRANSFORMERS)


def quality_row(label: str, found: dict[str, Any]) -> str:
    """A row: bytes, change in perplexity, divergence, and agreement."""
    overall = found["overall"]
    change = 100 * (overall["perplexity_ratio"] - 1)
    sign = "−" if change < 0 else "+"
    return (
        f"| {label} | {decimal(100 * found['bytes']['of_bfloat16'], 1)}% | "
        f"{sign}{decimal(abs(change), 3)}% | {two_digits(overall['mean_kl'])} | "
        f"{decimal(100 * overall['top1'], 2)}% |"
    )


def decimal(x: float, digits: int = 0) -> Decimal:
    """Round ``x`` to ``digits`` digits after the decimal point. A half is rounded up."""
    return Decimal(repr(x)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)


def two_digits(x: float) -> str:
    """A positive number with two significant digits, without an exponent."""
    return f"{Decimal(f'{x:.1e}'):f}"


def main() -> int:
    claims = all_page_claims()
    for claim in claims:
        state = "ok" if claim.holds else "MISSING"
        print(f"{state:7} {claim.page}: {claim.text} ({claim.file})")
    return int(not all(claim.holds for claim in claims))


if __name__ == "__main__":
    sys.exit(main())
