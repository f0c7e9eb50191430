"""What an engine has done, and has, as numbers."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass
class Counters:
    """What an engine has done so far.

    ``steps``; ``requests``: that were given a row; ``prompt_tokens``, ``cached_tokens``: of these,
    and those of them that others had computed; ``prefill_tokens``, ``padding_tokens``: of prompts,
    that were computed, and what they were filled up with; ``new_tokens``: that were chosen, those
    behind a stop string among them; ``preemptions``: requests that gave their memory to others,
    ``swapped`` of them with all that they had on the host; ``drafted_tokens``, ``accepted_tokens``:
    that were proposed, and that were what the model said, but for those that it had not said yet
    when their request gave its memory away. ``host_seconds``: in ``step``, without
    ``waiting_seconds``, in which it waited for the device.
    """

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    padding_tokens: int = 0
    new_tokens: int = 0
    preemptions: int = 0
    swapped: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    host_seconds: float = 0.0
    waiting_seconds: float = 0.0


@dataclass
class EngineStats(Counters):
    """``Counters``, and what there is now.

    ``rows``: that there are; ``running``, ``waiting``: requests with a row and without; ``pages``,
    ``free``, ``used``: of each pool, all, those that nobody has, and those that requests have;
    ``swapped_bytes``: on the host, of requests that wait. Bytes that are allocated as long as the
    engine lives: ``weight_bytes``, parameters, which are the model's own arrays; ``pool_bytes``,
    all pages, used or not; ``row_bytes``, what rows have beside them: tails, windows, and texts and
    numbers that their tokens are drawn by; ``draft_bytes``, all of a draft's model that is not the
    model's.
    """

    rows: int = 0
    running: int = 0
    waiting: int = 0
    pages: tuple[int, ...] = ()
    free: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    swapped_bytes: int = 0
    weight_bytes: int = 0
    pool_bytes: int = 0
    row_bytes: int = 0
    draft_bytes: int = 0

    @property
    def cached(self) -> tuple[int, ...]:
        """Pages of each pool that no request has, and that are kept for others to begin with."""
        each = zip(self.pages, self.free, self.used, strict=True)
        return tuple(max(pages - free - used, 0) for pages, free, used in each)

    @property
    def usage(self) -> float:
        """The largest share of a pool that requests have, from 0 to 1."""
        return max((n / of for n, of in zip(self.used, self.pages, strict=True)), default=0.0)


def counted(counters: Counters) -> dict[str, Any]:
    """Counters by name."""
    return {each.name: getattr(counters, each.name) for each in fields(Counters)}
