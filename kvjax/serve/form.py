"""What an endpoint answers for itself; the rest is the same for all."""

from collections.abc import Collection
from typing import Any, Protocol

from kvjax.sampling.scores import TokenScore
from kvjax.serve.fields import Fields
from kvjax.serve.parse_request import Asked

Scored = list[tuple[int, TokenScore | None, int]]
"""Tokens, with what is known of them, None of the first of a prompt, and where in the text each
begins."""


class Form(Protocol):
    """``prefix``: of ids; ``whole``, ``part``: what OpenAI calls an answer, and a piece of one."""

    prefix: str
    whole: str
    part: str

    def read(self, fields: Fields) -> Asked:
        """Take the fields that only this endpoint has."""
        ...

    def choice(self, index: int, text: str, scored: Scored | None, reason: str) -> dict[str, Any]:
        """A choice that has ended."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before the first piece of a choice, None for nothing."""
        ...

    def piece(
        self, index: int, text: str, scored: Scored | None, reason: str | None
    ) -> dict[str, Any]:
        """A piece of a choice; ``reason``: why it ends here, None where it goes on."""
        ...


def with_scores(
    tokens: list[int], scores: list[TokenScore] | None, starts: list[int], ends: Collection[int]
) -> Scored:
    """Tokens beside their scores and starts, without the one of ``ends`` that ends a text and is
    none of it."""
    each = zip(tokens, scores or [], starts, strict=True)
    return [one for one in each if one[0] not in ends]


def in_json(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)
