"""Statistics of an engine: counters, and its current use of rows and memory."""

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Counts of an engine's work since it was created.

    Args:
      steps: calls of ``Engine.step``.
      requests: requests that were admitted to a row.
      prompt_tokens: prompt tokens of these requests.
      cached_tokens: prompt tokens whose keys and values came from the prefix cache.
      prefill_tokens: prompt tokens that were computed.
      padding_tokens: padding tokens that were computed in addition.
      new_tokens: generated tokens, including any after a stop string.
      preemptions: how often a running request lost its row and pages.
      swapped: preemptions that moved the request's state to the host. After other preemptions, the
        state is recomputed.
      drafted_tokens: tokens that were drafted and verified.
      accepted_tokens: drafted tokens that the model accepted. Tokens whose verification was still
        in flight when their request was preempted are not counted.
      host_seconds: seconds in ``Engine.step``, without ``waiting_seconds``.
      waiting_seconds: seconds in which ``Engine.step`` waited for the device.
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

    def as_dict(self) -> dict[str, int | float]:
        """Return the counters by name."""
        return {field.name: getattr(self, field.name) for field in fields(Counters)}


@dataclass
class EngineStats(Counters):
    """``Counters`` of the work done, and the current use of rows and memory.

    Args:
      rows: number of rows of the cache.
      running: requests that have a row.
      waiting: requests without a row.
      pages: number of pages of each pool.
      free_pages: number of free pages of each pool.
      used_pages: number of pages of each pool that running requests use.
      swapped_bytes: bytes of host memory that preempted requests use.
      weight_bytes: bytes of the parameters, which are the model's own arrays.
      pool_bytes: bytes of all pages, used or free.
      row_bytes: bytes of the rows' other arrays: tails, windows, and the state that sampling needs.
      draft_bytes: bytes of a draft model's cache, and of the parameters that it does not share with
        the model.

    Example:
      ```python
      limits = kvjax.memory.InferenceLimits(max_batch_size=4, max_seq_len=256)
      engine = kvjax.Engine(lm, limits=limits)
      stats = engine.stats()
      print(stats.running, stats.waiting, stats.free_pages, stats.usage)
      ```
    """

    rows: int = 0
    running: int = 0
    waiting: int = 0
    pages: tuple[int, ...] = ()
    free_pages: tuple[int, ...] = ()
    used_pages: tuple[int, ...] = ()
    swapped_bytes: int = 0
    weight_bytes: int = 0
    pool_bytes: int = 0
    row_bytes: int = 0
    draft_bytes: int = 0

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """The number of pages of each pool that only the prefix cache uses."""
        pools = zip(self.pages, self.free_pages, self.used_pages, strict=True)
        return tuple(max(pages - free - used, 0) for pages, free, used in pools)

    @property
    def usage(self) -> float:
        """The fraction of a pool that running requests use, from 0 to 1. It is the maximum over all
        pools."""
        pools = zip(self.used_pages, self.pages, strict=True)
        return max((used / pages for used, pages in pools), default=0.0)
