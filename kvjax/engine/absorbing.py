"""What programs have chosen, taken into the requests that it is for."""

from typing import Any

from kvjax.core.errors import NonFiniteError
from kvjax.engine.handle import Handle, TokenScore


def taken_in(report: Any, at: int, handle: Handle, before: int) -> tuple[int, str | None]:
    """Give a request the tokens that an entry of a report has for it, behind those that it had been
    sent for ``before``: of one that is computed again some are known. How many were new, and why it
    has ended, None where it has not.

    ``report``: ``programs.Report``, on the host.
    """
    count, known = int(report.count[at]) - before, max(len(handle.drawn) - before, 0)
    tokens = report.tokens[at, known:count].tolist()
    handle.pushed(tokens, _scores(report.scores, at, known, count, handle.request.scores))
    if report.broken[at]:
        handle.error = NonFiniteError(
            f"the logits are not finite numbers after {len(handle.drawn)} new tokens; nothing was "
            "drawn from them"
        )
        return len(tokens), "error"
    if handle.done:
        return len(tokens), "stop"
    if report.done[at] and len(handle.drawn) == int(report.count[at]):
        return len(tokens), "eos" if handle.drawn[-1] in handle.request.eos else "length"
    return len(tokens), None


def _scores(scores: Any, at: int, first: int, end: int, most: int | None) -> list[TokenScore]:
    """Of tokens from one to another, where they were asked for."""
    if most is None:
        return []
    chosen = scores.chosen[at, first:end].tolist()
    ids = scores.ids[at, first:end, :most].tolist()
    likeliest = scores.likeliest[at, first:end, :most].tolist()
    return [
        TokenScore(own, tuple(zip(*others, strict=True)))
        for own, *others in zip(chosen, ids, likeliest, strict=True)
    ]
