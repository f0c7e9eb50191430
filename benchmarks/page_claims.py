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
SPEED = "amd-epyc-jax0.12.0.1-smollm2-135m-instruct.q4_1/decode.json"
DRAFTS = "amd-epyc-jax0.10.2-smollm2-135m-instruct.q4_1/drafts.md"
POLICIES, EMBEDDED = "quality/smollm2-policies.json", "quality/held_out-policies.json"
TRANSFORMERS, LLAMA_CPP = "quality/smollm2-transformers.json", "quality/smollm2-llama_cpp.json"
RETRIEVAL = "amd-epyc-jax0.12.0.1/retrieval-smollm2-135m-instruct-q4_1/retrieval.json"
README, QUANTIZATION = "README.md", "docs/quantization.md"
INDEX, PERFORMANCE = "docs/index.md", "docs/performance.md"

CELLS = ((1, 64), (1, 2048), (1, 8192), (8, 64), (8, 2048))
IN_INDEX = ((1, 64), (1, 8192), (8, 2048))


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
    return [*_speed(), *_drafts(), *_quality(), *_peers(), *_retrieval()]


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
        figures = (step(engines, "kvjax"), theirs, step(engines, "llama_cpp-f16"), uncached)
        text = " | ".join(f"{decimal(figure):,}" for figure in figures)
        pages = (
            (README, PERFORMANCE, INDEX) if (batch, prompt) in IN_INDEX else (README, PERFORMANCE)
        )
        for page in pages:
            yield PageClaim(page, f"| {batch} × {prompt:,} | {text} |", SPEED)
    one_row = [cells[cell] for cell in CELLS if cell[0] == 1]
    ratios = sorted(step(x, "kvjax") / step(x, "llama_cpp-f16") for x in one_row)
    text = f"llama.cpp is {decimal(ratios[0], 1)} to {decimal(ratios[-1], 1)} times as fast"
    yield PageClaim(README, text, SPEED)


def _drafts() -> Iterator[PageClaim]:
    """Return the rows of the table of drafts. ``drafts.md`` has the same figures."""
    for line in (RESULTS / DRAFTS).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith(("| lookup", "| first")):
            median, span = cells[2].rstrip(")").split(" (")
            text = f"| {cells[0]} | {cells[1]} | {median}, {span} | {cells[3]} |"
            yield PageClaim("docs/generating-drafts.md", text, DRAFTS)


def _quality() -> Iterator[PageClaim]:
    found, embedded = _load(POLICIES), _load(EMBEDDED)
    for name in ("bits=8", "bits=4", "bits=3", "bits=2"):
        for page in (README, INDEX):
            yield PageClaim(page, quality_row(f"`{name}`", found[name]), POLICIES)
    for file, results in ((POLICIES, found), (EMBEDDED, embedded)):
        for name in ("bits=8", "bits=4", "bits=3", "key_bits=4,value_bits=2", "bits=2", "bits=1"):
            label = f"`{name.replace(',', ', ')}`"
            yield PageClaim(QUANTIZATION, quality_row(label, results[name]), file)
    for bits in (4, 3, 2):
        name = f"TurboQuant({bits})"
        yield PageClaim(QUANTIZATION, quality_row(f"`{name}`", found[name]), POLICIES)


def _peers() -> Iterator[PageClaim]:
    theirs, llama_cpp = _load(TRANSFORMERS), _load(LLAMA_CPP)
    for file, found in ((TRANSFORMERS, theirs), (LLAMA_CPP, llama_cpp)):
        for name, each in found.items():
            if not name.startswith("kvjax") and "q5" not in name:
                yield PageClaim(QUANTIZATION, quality_row(name, each), file)
    for name in ("bits=8", "bits=4", "bits=2"):
        row = quality_row(f"`{name}`", theirs[f"kvjax {name}"])
        yield PageClaim(QUANTIZATION, row, TRANSFORMERS)
    ours = theirs["kvjax bits=4"]["overall"]["mean_kl"]
    ratios = sorted(
        each["overall"]["mean_kl"] / ours for name, each in theirs.items() if " 4 bits" in name
    )
    text = (
        f"Transformers' quanto and HQQ caches have {decimal(ratios[0])} to {decimal(ratios[-1])} "
        "times the KL divergence of kvjax's cache"
    )
    yield PageClaim(README, text, TRANSFORMERS)
    ours, q4_0 = (llama_cpp[x]["overall"]["mean_kl"] for x in ("kvjax bits=4", "llama.cpp q4_0"))
    yield PageClaim(README, f"llama.cpp's q4_0 has {decimal(q4_0 / ours)} times", LLAMA_CPP)


def _retrieval() -> Iterator[PageClaim]:
    """Return the rows of the table of retrieval: for each length, the mean of both scores over the
    tasks that the raw cache solves."""
    found = _load(RETRIEVAL)
    for policy in found["policies"]:
        if policy not in found["same_as_raw"]:
            means = [
                _mean_scores(found["cells"], policy, length, score)
                for score in ("likelihood", "text")
                for length in found["lengths"]
            ]
            text = " | ".join(f"{decimal(100 * mean)}%" for mean in means)
            yield PageClaim(QUANTIZATION, f"| {RETRIEVAL_LABELS[policy]} | {text} |", RETRIEVAL)


def _mean_scores(cells: list[dict[str, Any]], policy: str, length: int, score: str) -> float:
    return statistics.mean(
        cell["policies"][policy][score]
        for cell in cells
        if cell["length"] == length and not cell["raw_at_chance"][score]
    )


RETRIEVAL_LABELS = {
    "raw": "full precision",
    **{str(bits): f"`bits={bits}`" for bits in (8, 4, 3, 2)},
    "sinks": "`sliding_window`, 508 tokens and 4 sinks",
}


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
