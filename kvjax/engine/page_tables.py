"""Pages of the rows' texts, counted on the host, beside those of a tree of prefixes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.prefixes.radix import Node
from kvjax.prefixes.sequences import CachedSequences


class PageTables:
    """Which pages each row has. ``tables``: of each kind of layers int32[rows, columns].

    Rows take pages before a program writes in them, and give back those that their windows have
    left behind all that the program reads.
    """

    def __init__(self, prefixes: CachedSequences, rows: int) -> None:
        self._prefixes, self._kinds = prefixes, prefixes.pool_config.groups
        self.tables = [
            np.full((rows, kind.page_group.layout.columns), -1, np.int32) for kind in self._kinds
        ]
        # Of each kind and row, the pages from the first that it has to the last, through its text.
        self._first = np.zeros((len(self._kinds), rows), int)
        self._end = np.zeros((len(self._kinds), rows), int)

    def begin(self, row: int, path: Sequence[Node], tokens: int) -> list[int]:
        """Let an empty row have the full pages of a text that is known, and empty ones in place of
        those that are not full; these, of each kind, -1 for none."""
        fresh = []
        for number, kind in enumerate(self._kinds):
            layout, counts = kind.page_group.layout, self._prefixes.pool.allocators[number]
            table, (full, part) = self.tables[number], kind.pages_for(tokens)
            for page in full:
                found = self._prefixes.entry(path, number, page).page
                counts.retain(found)
                table[row, kind.column(page)] = found
            if part is not None:
                table[row, kind.column(part)] = counts.allocate()
            fresh.append(-1 if part is None else int(table[row, kind.column(part)]))
            units = int(kind.page_group.units(tokens))
            self._first[number, row] = int(layout.gone_before(units))
            self._end[number, row] = int(layout.filled(units))
        return fresh

    def wanted(self, rows: Sequence[int], tokens: int) -> list[int]:
        """How many free pages of each kind rows take to have so many tokens each, one after the
        other."""
        found = []
        for number, kind in enumerate(self._kinds):
            end, gone = self._reach(number, tokens)
            counts, table = self._prefixes.pool.allocators[number], self.tables[number]
            leaving = Counter(
                int(table[row, kind.column(page)])
                for row in rows
                for page in self._left(number, row, gone)
            )
            # Beams may share what they leave.
            spare = sum(page >= 0 and counts.refs[page] == n for page, n in leaving.items())
            new = sum(max(end - int(self._end[number, row]), 0) for row in rows)
            found.append(max(new - spare, 0))
        return found

    def extend(self, row: int, tokens: int) -> None:
        """Let a row have the pages of so many tokens, which are free."""
        for number, kind in enumerate(self._kinds):
            end, gone = self._reach(number, tokens)
            counts, table = self._prefixes.pool.allocators[number], self.tables[number]
            for page in self._left(number, row, gone):
                column = kind.column(page)
                if table[row, column] >= 0:
                    counts.release(int(table[row, column]))
                    table[row, column] = -1
            for page in range(int(self._end[number, row]), end):
                column = kind.column(page)
                assert table[row, column] < 0
                table[row, column] = counts.allocate()
            self._first[number, row] = max(self._first[number, row], gone)
            self._end[number, row] = max(self._end[number, row], end)

    def wanting(self, row: int, tokens: int) -> list[bool]:
        """Of each kind, whether a row is to take further pages to come to so many tokens."""
        reach = (self._reach(number, tokens)[0] for number in range(len(self._kinds)))
        return [end > int(ends[row]) for end, ends in zip(reach, self._end, strict=True)]

    def release(self, row: int) -> None:
        """Let a row have none."""
        for counts, table in zip(self._prefixes.pool.allocators, self.tables, strict=True):
            for page in table[row][table[row] >= 0].tolist():
                counts.release(page)
            table[row] = -1
        self._first[:, row] = self._end[:, row] = 0

    def branch(self, source: int, row: int, tokens: int) -> list[tuple[int, int]]:
        """Let an empty row go on from one of so many tokens, whose full pages it shares; of each
        kind the page that is not full, and a free one that is to be the same, -1 for none."""
        found = []
        for number, kind in enumerate(self._kinds):
            counts, table = self._prefixes.pool.allocators[number], self.tables[number]
            table[row], part = table[source], kind.pages_for(tokens)[1]
            pages = -1, -1
            if part is not None:
                column = kind.column(part)
                pages = int(table[source, column]), counts.allocate()
                table[row, column] = pages[1]
            for page in table[row][table[row] >= 0].tolist():
                if page != pages[1]:
                    counts.retain(page)
            found.append(pages)
        for ends in (self._first, self._end):
            ends[:, row] = ends[:, source]
        return found

    def partly(self, row: int, tokens: int) -> list[int]:
        """The page of each kind that is not full where a row has so many tokens, 0 for none."""
        found = []
        for kind, table in zip(self._kinds, self.tables, strict=True):
            page = kind.pages_for(tokens)[1]
            found.append(0 if page is None else int(table[row, kind.column(page)]))
        return found

    def retained(self, row: int, tokens: int) -> list[np.ndarray | None]:
        """Of the kinds whose windows move, the pages that a row's text goes on with behind so many
        tokens, as a table; None of other kinds."""
        found: list[np.ndarray | None] = []
        for number, kind in enumerate(self._kinds):
            if not kind.windowed:
                found.append(None)
                continue
            table = np.full_like(self.tables[number][row], -1)
            for page in kind.pages_for(tokens)[0]:
                column = kind.column(page)
                table[column] = self.tables[number][row, column]
            found.append(table)
        return found

    def of(self, row: int) -> list[list[tuple[int, int]]]:
        """Of each kind, the columns of a row that have a page, and the pages."""
        return [
            [(int(column), int(table[row, column])) for column in np.flatnonzero(table[row] >= 0)]
            for table in self.tables
        ]

    def take_up(self, row: int, columns: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Let an empty row of so many tokens have a free page in some columns of each kind; these
        pages."""
        found = []
        for number, (kind, some) in enumerate(zip(self._kinds, columns, strict=True)):
            layout, units = kind.page_group.layout, int(kind.page_group.units(tokens))
            pages = [self._prefixes.pool.allocators[number].allocate() for _ in some]
            self.tables[number][row, list(some)] = pages
            self._first[number, row] = int(layout.gone_before(units))
            self._end[number, row] = int(layout.filled(units))
            found.append(pages)
        return found

    def counted(self) -> dict[str, Any]:
        """Of each pool how many pages there are, are free, and are had by rows; by the names of
        ``EngineStats``."""
        counts = self._prefixes.pool.allocators
        return {
            "pages": tuple(len(each.refs) for each in counts),
            "free": tuple(len(each.free) for each in counts),
            "used": tuple(np.unique(table[table >= 0]).size for table in self.tables),
        }

    def _reach(self, number: int, tokens: int) -> tuple[int, int]:
        """Pages that so many tokens fill, and the first of them that a query may still see."""
        page_group = self._kinds[number].page_group
        units = int(page_group.units(tokens))
        layout = page_group.layout
        return int(layout.filled(units)), int(layout.gone_before(units))

    def _left(self, number: int, row: int, gone: int) -> range:
        """The pages that windows leave, behind the sinks'."""
        first = max(int(self._first[number, row]), self._kinds[number].page_group.layout.sink_pages)
        return range(first, gone)
