"""Several texts of one prompt, and what each is worth."""

import math
from typing import Any

from kvjax.cli.output import score
from kvjax.generation.results import GenerationResult


def choices(result: GenerationResult) -> list[dict[str, Any]]:
    """The texts as JSON has them."""
    found: list[dict[str, Any]] = []
    for row, (text, tokens) in enumerate(zip(result.text, result.tokens, strict=True)):
        found.append({"text": text, "tokens": tokens})
        if result.sequence_scores is not None:
            worth = result.sequence_scores[row]
            found[row]["sequence_score"] = worth if math.isfinite(worth) else None
        if result.logprobs is not None:
            found[row]["logprobs"] = [score(each) for each in result.logprobs[row]]
    return found


def headed(result: GenerationResult) -> str:
    """The texts, each behind a line with its number and score."""
    parts = []
    for row, text in enumerate(result.text):
        worth = "" if result.sequence_scores is None else f" ({result.sequence_scores[row]:.4f})"
        parts.append(f"--- {row + 1}{worth}\n{text}")
    return "\n".join(parts)
