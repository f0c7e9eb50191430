"""What programs have chosen, taken into the requests that it is for."""

from typing import Any

from kvjax.core.errors import NonFiniteError
from kvjax.engine.beams import BeamRows
from kvjax.engine.handle import Handle
from kvjax.sampling.scores import token_scores


def taken_in(report: Any, at: int, handle: Handle, before: int) -> tuple[int, str | None]:
    """Give a request the tokens that an entry of a report has for it, behind those that it had been
    sent for ``before``: of one that is computed again some are known. How many were new, and why it
    has ended, None where it has not.

    ``report``: ``programs.Report``, on the host.
    """
    if handle.beams is not None:
        return _searched(report, at, handle, handle.beams, before)
    count, known = int(report.count[at]) - before, max(len(handle.drawn) - before, 0)
    tokens, most = report.tokens[at, known:count].tolist(), handle.request.scores
    told = [] if most is None else token_scores(report.scores, at, known, count, most)
    handle.pushed(tokens, told)
    if report.broken[at]:
        return len(tokens), _broken(handle, len(handle.drawn))
    if handle.done:
        return len(tokens), "stop"
    if report.done[at] and len(handle.drawn) == int(report.count[at]):
        return len(tokens), "eos" if handle.drawn[-1] in handle.request.eos else "length"
    return len(tokens), None


def _searched(
    report: Any, at: int, handle: Handle, beams: BeamRows, beam: int
) -> tuple[int, str | None]:
    """``taken_in`` of one of a search's beams: its texts are known at its end alone."""
    if not beams.running:
        return 0, None
    if report.broken[at]:
        return 0, _broken(handle, int(report.count[at]))
    if not beams.take_in(report.scores, at, beam):
        return 1, None
    handle.searched()
    return 1, handle.found[0].reason if handle.found else "error"


def _broken(handle: Handle, count: int) -> str:
    handle.error = NonFiniteError(
        f"the logits are not finite numbers after {count} new tokens; nothing was drawn from them"
    )
    return "error"
