"""Page tables of an engine's rows, kept on the host."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.prefixes.radix import Node
from kvjax.prefixes.sequences import CachedSequences


class PageTables:
    """The pages of each row; ``tables``: for each cache group int32[rows, columns], -1 for none.

    A row takes pages before a program writes to them. It returns pages that its window has left
    before the next program reads.
    """

    def __init__(self, prefixes: CachedSequences, rows: int) -> None:
        self._groups, self._pools = prefixes.pool_config.groups, prefixes.pool.allocators
        self._prefixes = prefixes
        self.tables = [
            np.full((rows, group.page_group.layout.columns), -1, np.int32) for group in self._groups
        ]
        # For each group and row: the first page that it has, and the end, counted in its sequence.
        self._first = np.zeros((len(self._groups), rows), int)
        self._end = np.zeros((len(self._groups), rows), int)

    def share(self, row: int, path: Sequence[Node], tokens: int) -> list[int]:
        """Give an empty row the full pages of ``tokens`` cached tokens, and a free page in place of
        the last one if that is partly full. Returns this page for each group, -1 for none."""
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
        """How many free pages of each group ``rows`` need, to have ``tokens`` tokens each."""
        missing = []
        for number, group in enumerate(self._groups):
            end, first = self._span(number, tokens)
            pool, table = self._pools[number], self.tables[number]
            leaving = Counter(
                int(table[row, group.column(place)])
                for row in rows
                for place in self._leaving(number, row, first)
            )
            # A page that beams share becomes free when all of them leave it.
            freed = sum(page >= 0 and pool.refs[page] == count for page, count in leaving.items())
            new = sum(max(end - int(self._end[number, row]), 0) for row in rows)
            missing.append(max(new - freed, 0))
        return missing

    def extend(self, row: int, tokens: int) -> None:
        """Give a row the pages of ``tokens`` tokens; enough pages must be free."""
        for number, group in enumerate(self._groups):
            end, first = self._span(number, tokens)
            pool, table = self._pools[number], self.tables[number]
            for place in self._leaving(number, row, first):
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
        """For each group, whether a row takes further pages on the way to ``tokens`` tokens."""
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
        for each group the source's partly full page and the free page to copy it to, -1 for
        none."""
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
        """For each group, the partly full page of a row with ``tokens`` tokens, 0 for none."""
        pages = []
        for group, table in zip(self._groups, self.tables, strict=True):
            part = group.pages_for(tokens)[1]
            pages.append(0 if part is None else int(table[row, group.column(part)]))
        return pages

    def window_tables(self, row: int, tokens: int) -> list[np.ndarray | None]:
        """For each group with a window, the table of the full pages that a sequence needs to
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
        """For each group, the (column, page) pairs of a row."""
        return [
            [(int(column), int(table[row, column])) for column in np.flatnonzero(table[row] >= 0)]
            for table in self.tables
        ]

    def take(self, row: int, columns: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Give an empty row, which will have ``tokens`` tokens, free pages in the ``columns`` of
        each group. Returns these pages."""
        taken = []
        for number, own in enumerate(columns):
            pages = [self._pools[number].allocate() for _ in own]
            self.tables[number][row, list(own)] = pages
            self._end[number, row], self._first[number, row] = self._span(number, tokens)
            taken.append(pages)
        return taken

    def counts(self) -> dict[str, Any]:
        """The fields ``pages``, ``free_pages`` and ``used_pages`` of ``EngineStats``."""
        return {
            "pages": tuple(len(pool.refs) for pool in self._pools),
            "free_pages": tuple(len(pool.free) for pool in self._pools),
            "used_pages": tuple(np.unique(table[table >= 0]).size for table in self.tables),
        }

    def _span(self, number: int, tokens: int) -> tuple[int, int]:
        """The number of pages that ``tokens`` tokens reach, and the first that a query still
        sees."""
        page_group = self._groups[number].page_group
        layout, units = page_group.layout, int(page_group.units(tokens))
        return int(layout.filled(units)), int(layout.gone_before(units))

    def _leaving(self, number: int, row: int, first: int) -> range:
        """The pages before ``first`` that the row still has, without sink pages."""
        sinks = self._groups[number].page_group.layout.sink_pages
        return range(max(int(self._first[number, row]), sinks), first)
