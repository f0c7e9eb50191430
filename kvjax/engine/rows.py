"""The rows of an engine on the host: the request in each, page tables, and parameters as arrays."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np

from kvjax.core.transfer import commit
from kvjax.engine.drafts import AdjustCost
from kvjax.engine.handle import Handle
from kvjax.engine.programs import RowParams
from kvjax.engine.request import MAX_BIASED_TOKENS, MAX_EOS_TOKENS, Request
from kvjax.placement.device import Device
from kvjax.prefixes.radix import Namespace, Node
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.params import NO_TOKEN, SamplingArrays, prepare_sampling
from kvjax.sampling.scores import MAX_LOGPROBS


@dataclass
class RunningSequence:
    """A request that has a row, or one row for each beam.

    ``length`` and ``sampled`` describe the row after all dispatched programs have run, assuming
    that it does not end before. While a draft is being verified, they are the values before the
    draft, because the host does not know yet how many of its tokens will be accepted.

    Args:
      handle: the request.
      row: the request's row, or the row of its first beam.
      namespace: the part of the prefix cache in which the request shares prefixes.
      checkpoints: prompt lengths at which the row's state is stored in the prefix cache.
      length: number of tokens that the row has in the cache.
      sampled: number of new tokens.
      fresh: whether no program has been dispatched for the request yet.
      verifying: number of drafted tokens whose verification is in flight.
      draft_length: number of tokens that the draft model has in its cache for this row.
      beam_rows: rows of the other beams. They have the same length as the first.
    """

    handle: Handle
    row: int
    namespace: Namespace
    checkpoints: set[int] = field(default_factory=set)
    length: int = 0
    sampled: int = 0
    fresh: bool = True
    verifying: int = 0
    draft_length: int = 0
    beam_rows: tuple[int, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """The tokens of the request's prompt."""
        return self.handle.request.tokens

    @property
    def rows(self) -> list[int]:
        """All rows of the request."""
        return [self.row, *self.beam_rows]

    @property
    def entries(self) -> list[tuple[int, int]]:
        """The rows that take part in the next dispatch. Each has a number, which is the third part
        of an ``Entry``: the count of new tokens, or the index of the beam."""
        beams, rows = self.handle.beams, self.rows
        if beams is None:
            return [(self.row, self.sampled)]
        return [(rows[beam], beam) for beam in beams.active]

    @property
    def prefilling(self) -> bool:
        """Whether a part of the prompt has not been dispatched yet."""
        return self.length < len(self.prompt)

    @property
    def remaining(self) -> int:
        """The number of new tokens that may still be dispatched."""
        return self.handle.request.max_new_tokens - self.sampled

    def rounds(self, limit: int, max_draft: int, adjust: AdjustCost) -> int:
        """Return how many rounds of decoding to dispatch, at most ``limit``.

        A beam search waits for each of its tokens before the next round. So does a request with a
        guide, except for tokens that are known from before a preemption. A request that is about to
        draft waits for all of its programs in flight.
        """
        handle, limit = self.handle, min(limit, self.remaining)
        if self.verifying:
            return 0
        if handle.beams is not None:
            return 0 if handle.in_flight else 1
        guided, drafts = handle.request.guide is not None, handle.drafts
        if not guided and (drafts is None or drafts.idle(max_draft, adjust)):
            return limit
        known = len(handle.generated) - self.sampled
        if known > 0 or handle.in_flight:
            return min(limit, max(known, 0))
        return min(limit, 1) if guided else limit

    def relative_cost(self, max_draft: int, adjust: AdjustCost) -> float:
        """Return the cost of the request's tokens with drafts, divided by the cost without drafts;
        see ``DraftState``."""
        drafts = self.handle.drafts
        if drafts is None:
            return math.inf
        limit = min(max_draft, self.remaining - 1)
        return drafts.relative_cost(limit, adjust, known=not self.handle.in_flight)

    def next_draft(self, max_draft: int, adjust: AdjustCost) -> tuple[int, list[int]]:
        """Return how many drafted tokens to verify next, and the tokens if they are looked up. The
        number is 0 while a program is in flight, or while tokens are known from before a
        preemption."""
        handle = self.handle
        if handle.drafts is None or handle.in_flight or len(handle.generated) > self.sampled:
            return 0, []
        return handle.drafts.next(min(max_draft, self.remaining - 1), adjust)

    def settle_draft(self) -> int:
        """Update the lengths after the output of a verification has arrived. Returns how many
        drafted tokens were accepted."""
        if not self.verifying or self.handle.in_flight:
            return 0
        new, drafted = len(self.handle.generated) - self.sampled, self.verifying
        self.verifying, self.length, self.sampled = 0, self.length + new, self.sampled + new
        accepted = max(new - 1, 0)
        if self.handle.drafts is not None:
            self.handle.drafts.record(drafted, accepted)
            if self.handle.drafts.by_model:  # the draft model's cache lacks its last proposed token
                self.draft_length += min(accepted, drafted - 1)
        return accepted

    def forced(self, rounds: int) -> list[int]:
        """Return the next ``rounds`` tokens: first the tokens known from before a preemption, then
        -1."""
        known = self.handle.generated[self.sampled : self.sampled + rounds]
        return [*known, *[-1] * (rounds - len(known))]


class PageTables:
    """The pages of each row.

    ``tables`` has the page table of each cache group, int32[rows, columns], with -1 where there is
    no page. A row takes pages before a program writes to them. A row returns the pages that are out
    of its window before the next program reads.
    """

    def __init__(self, prefixes: CachedSequences, rows: int) -> None:
        self._groups, self._pools = prefixes.pool_config.groups, prefixes.pool.allocators
        self._prefixes = prefixes
        self.tables = [
            np.full((rows, group.page_group.layout.columns), -1, np.int32) for group in self._groups
        ]
        # For each group and row: the first page that it has, and the end of its pages. Pages are
        # counted from the start of the sequence.
        self._first = np.zeros((len(self._groups), rows), int)
        self._end = np.zeros((len(self._groups), rows), int)

    def share(self, row: int, path: Sequence[Node], tokens: int) -> list[int]:
        """Give an empty row the pages of ``tokens`` cached tokens. Full pages are shared. If the
        last page is only partly full, the row gets a free page instead. Returns this free page for
        each group, or -1 if the last page is full."""
        fresh = []
        for number, group in enumerate(self._groups):
            pool, table = self._pools[number], self.tables[number]
            full, part = group.pages_for(tokens)
            for place in full:
                page = self._prefixes.entry(path, number, place).page
                pool.retain(page)
                table[row, group.column(place)] = page
            if part is not None:
                table[row, group.column(part)] = pool.allocate()
            fresh.append(-1 if part is None else int(table[row, group.column(part)]))
            self._end[number, row], self._first[number, row] = self._span(number, tokens)
        return fresh

    def missing(self, rows: Sequence[int], tokens: int) -> list[int]:
        """Return how many free pages of each group ``rows`` need so that each has ``tokens``
        tokens."""
        missing = []
        for number, group in enumerate(self._groups):
            end, first = self._span(number, tokens)
            pool, table = self._pools[number], self.tables[number]
            passed = Counter(
                int(table[row, group.column(place)])
                for row in rows
                for place in self._passed_pages(number, row, first)
            )
            # A page that beams share becomes free when it is out of the window of all of them.
            freed = sum(page >= 0 and pool.refs[page] == count for page, count in passed.items())
            new = sum(max(end - int(self._end[number, row]), 0) for row in rows)
            missing.append(max(new - freed, 0))
        return missing

    def extend(self, row: int, tokens: int) -> None:
        """Give a row the pages for ``tokens`` tokens. Enough pages must be free."""
        for number, group in enumerate(self._groups):
            end, first = self._span(number, tokens)
            pool, table = self._pools[number], self.tables[number]
            for place in self._passed_pages(number, row, first):
                column = group.column(place)
                if table[row, column] >= 0:
                    pool.release(int(table[row, column]))
                    table[row, column] = -1
            for place in range(int(self._end[number, row]), end):
                column = group.column(place)
                assert table[row, column] < 0
                table[row, column] = pool.allocate()
            self._first[number, row] = max(self._first[number, row], first)
            self._end[number, row] = max(self._end[number, row], end)

    def needs_pages(self, row: int, tokens: int) -> list[bool]:
        """For each group, return whether a row needs more pages until it has ``tokens`` tokens."""
        ends = (self._span(number, tokens)[0] for number in range(len(self._groups)))
        return [end > int(own[row]) for end, own in zip(ends, self._end, strict=True)]

    def release(self, row: int) -> None:
        """Return all pages of a row."""
        for pool, table in zip(self._pools, self.tables, strict=True):
            for page in table[row][table[row] >= 0].tolist():
                pool.release(page)
            table[row] = -1
        self._first[:, row] = self._end[:, row] = 0

    def branch(self, source: int, row: int, tokens: int) -> list[tuple[int, int]]:
        """Let an empty row share the full pages of ``source``, which has ``tokens`` tokens. Returns
        for each group the source's partly full page and the free page to which it must be copied,
        or a pair of -1 if all pages are full."""
        copies = []
        for number, group in enumerate(self._groups):
            pool, table = self._pools[number], self.tables[number]
            table[row], part = table[source], group.pages_for(tokens)[1]
            pages = -1, -1
            if part is not None:
                column = group.column(part)
                pages = int(table[source, column]), pool.allocate()
                table[row, column] = pages[1]
            for shared in table[row][table[row] >= 0].tolist():
                if shared != pages[1]:
                    pool.retain(shared)
            copies.append(pages)
        for places in (self._first, self._end):
            places[:, row] = places[:, source]
        return copies

    def partial_pages(self, row: int, tokens: int) -> list[int]:
        """For each group, return the partly full page of a row with ``tokens`` tokens, or 0 if all
        its pages are full."""
        pages = []
        for group, table in zip(self._groups, self.tables, strict=True):
            part = group.pages_for(tokens)[1]
            pages.append(0 if part is None else int(table[row, group.column(part)]))
        return pages

    def window_tables(self, row: int, tokens: int) -> list[np.ndarray | None]:
        """For each group with a window, return a table with the full pages that a sequence needs to
        continue after ``tokens`` tokens; None for other groups."""
        tables: list[np.ndarray | None] = []
        for number, group in enumerate(self._groups):
            if not group.windowed:
                tables.append(None)
                continue
            table = np.full_like(self.tables[number][row], -1)
            for place in group.pages_for(tokens)[0]:
                column = group.column(place)
                table[column] = self.tables[number][row, column]
            tables.append(table)
        return tables

    def pages_of(self, row: int) -> list[list[tuple[int, int]]]:
        """For each group, return the (column, page) pairs of a row."""
        return [
            [(int(column), int(table[row, column])) for column in np.flatnonzero(table[row] >= 0)]
            for table in self.tables
        ]

    def take(self, row: int, columns: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Give an empty row free pages in the ``columns`` of each group. The row will have
        ``tokens`` tokens. Returns the pages."""
        taken = []
        for number, own in enumerate(columns):
            pages = [self._pools[number].allocate() for _ in own]
            self.tables[number][row, list(own)] = pages
            self._end[number, row], self._first[number, row] = self._span(number, tokens)
            taken.append(pages)
        return taken

    def counts(self) -> dict[str, Any]:
        """Return the fields ``pages``, ``free_pages`` and ``used_pages`` of ``EngineStats``."""
        return {
            "pages": tuple(len(pool.refs) for pool in self._pools),
            "free_pages": tuple(len(pool.free) for pool in self._pools),
            "used_pages": tuple(np.unique(table[table >= 0]).size for table in self.tables),
        }

    def _span(self, number: int, tokens: int) -> tuple[int, int]:
        """Return the number of pages up to the end of ``tokens`` tokens, and the first page that a
        query still sees."""
        page_group = self._groups[number].page_group
        layout, units = page_group.layout, int(page_group.units(tokens))
        return int(layout.filled(units)), int(layout.first_visible_page(units))

    def _passed_pages(self, number: int, row: int, first: int) -> range:
        """Return the pages before ``first`` that the row still has, without sink pages."""
        sinks = self._groups[number].page_group.layout.sink_pages
        return range(max(int(self._first[number, row]), sinks), first)


_PADDING = {
    "eos": (MAX_EOS_TOKENS, NO_TOKEN),
    "biased": (MAX_BIASED_TOKENS, NO_TOKEN),
    "bias": (MAX_BIASED_TOKENS, 0),
}
"""The width and the padding value of sampling parameters that are lists of tokens."""


class SamplingState:
    """The ``RowParams`` of all rows on the host, and a copy on the device that is reused while no
    row changes.

    A row without a request has the parameters of a greedy request without any filter, so that it
    does not switch filters on for the others.
    """

    def __init__(self, rows: int, placement: Device) -> None:
        self._placement = placement
        self._on_device: RowParams | None = None
        self._neutral = _row_params(prepare_sampling(seeds=[0])[1], 0, 0, False)
        self._params: RowParams = jax.tree.map(lambda x: np.repeat(x, rows, axis=0), self._neutral)

    def set(self, row: int, request: Request) -> None:
        """Give a row the parameters of a request."""
        logprobs = request.logprobs if request.search is None else MAX_LOGPROBS
        number = 0 if logprobs is None else 1 + logprobs
        searching = request.search is not None
        self._write(row, _row_params(request.sampling, request.max_new_tokens, number, searching))

    def clear(self, row: int) -> None:
        """Reset the parameters of a row to the parameters of a row without a request."""
        self._write(row, self._neutral)

    def for_rows(self, rows: np.ndarray) -> RowParams:
        """Return the parameters of ``rows`` (int32[n]). If they are all rows in order, the result
        is on the device. Otherwise it is on the host, and numbers beyond the last row select the
        last row."""
        count = len(self._params.limit)
        return self.all_rows() if len(rows) == count else self.copy(np.minimum(rows, count - 1))

    def all_rows(self) -> RowParams:
        """Return the parameters of all rows, on the device."""
        if (params := self._on_device) is None:
            # Copy the arrays, because the transfer may read them later.
            copies = jax.tree.map(np.array, self._params)
            params = self._on_device = commit(self._placement.put(copies))
        return params

    def copy(self, rows: np.ndarray) -> RowParams:
        """Copy the parameters of ``rows`` on the host. The copies do not change before a program
        reads them."""
        return jax.tree.map(lambda x: x[rows].copy(), self._params)

    def _write(self, row: int, params: RowParams) -> None:
        pairs = zip(jax.tree.leaves(self._params), jax.tree.leaves(params), strict=True)
        for array, new in pairs:
            array[row] = new[0]
        self._on_device = None


def _row_params(sampling: SamplingArrays, limit: int, logprobs: int, search: bool) -> RowParams:
    """Make the ``RowParams`` of a single row, padded to the width that all rows have."""
    arrays = {}
    for each in fields(SamplingArrays):
        array = np.asarray(getattr(sampling, each.name))
        if each.name in _PADDING:
            width, padding = _PADDING[each.name]
            new = np.full((1, width), padding, array.dtype)
            array = array[:, :width]
            new[:, : array.shape[1]] = array
            array = new
        arrays[each.name] = array
    numbers: Any = np.array([limit], np.int32), np.array([logprobs], np.int32), np.array([search])
    return RowParams(SamplingArrays(**arrays), *numbers)
