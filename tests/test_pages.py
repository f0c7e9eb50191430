"""Pages of a pool: the allocator against a naive model, and caches in pages."""

import functools
from collections import Counter

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvjax
from tests.matrix import FULL

PAGES, ROWS, COLUMNS = 11, 4, 5


def _jit(name):
    method = getattr(kvjax.PageAllocator, name)
    return jax.jit(lambda pool, *args: jax.tree.map(lambda x: x, method(pool, *args)))


APPEND, ALLOCATE, FORK, APART, DROP, FREE, RETAIN, RELEASE, WRITABLE = map(
    _jit,
    ("append", "allocate", "fork", "apart", "drop", "free", "retain", "release", "writable"),
)
FREE_PAGES = range(PAGES)


class AllocatorMachine(RuleBasedStateMachine):
    """Against tables that are lists, with whoever has a page besides counted apart."""

    def __init__(self):
        super().__init__()
        self.pool = jax.tree.map(jnp.asarray, kvjax.PageAllocator.create(PAGES, ROWS, COLUMNS))
        self.table = np.full((ROWS, COLUMNS), -1)
        self.pins = Counter()

    def held(self):
        return Counter(self.table[self.table >= 0].tolist()) + self.pins

    def free(self):
        return {*FREE_PAGES} - {*self.held()}

    def granted(self, wanted, before=0):
        """The rows that can have so many pages, the first ones first."""
        left, found = len(self.free()), []
        for n in wanted:
            before += n
            found.append(n == 0 or before <= left)
        return found

    def took(self, table, changed):
        """The new table is the old one but for free pages, each once, where it was to change."""
        fresh = table[changed].tolist()
        assert len({*fresh}) == len(fresh) and {*fresh} <= self.free()
        assert np.array_equal(np.where(changed, -1, table), np.where(changed, -1, self.table))
        self.table = table

    @rule(wanted=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=ROWS, max_size=ROWS))
    def append(self, wanted):
        length = (self.table >= 0).sum(1)
        columns = length[:, None] + np.arange(2)
        asks = np.array(wanted) & (columns < COLUMNS)
        asks[:, 1] &= asks[:, 0]
        had = np.array(self.granted(asks.sum(1)))
        self.pool, found = APPEND(self.pool, columns.astype(np.int32), asks)
        assert np.array_equal(found, had)
        changed = np.zeros((ROWS, COLUMNS), bool)
        for row, column in zip(*np.nonzero(asks & had[:, None]), strict=True):
            changed[row, columns[row, column]] = True
        self.took(np.array(self.pool.table), changed)

    @rule(row=st.integers(0, ROWS - 1), pages=st.integers(0, COLUMNS + 1))
    def allocate(self, row, pages):
        asks = (np.arange(COLUMNS) < pages) & (self.table[row] < 0)
        had = pages <= COLUMNS and asks.sum() <= len(self.free())
        self.pool, found = ALLOCATE(self.pool, row, pages)
        assert bool(found) == had
        changed = np.zeros((ROWS, COLUMNS), bool)
        changed[row] = asks & had
        self.took(np.array(self.pool.table), changed)

    @rule(keep=st.lists(st.integers(0, COLUMNS), min_size=ROWS, max_size=ROWS))
    def drop(self, keep):
        which = np.arange(COLUMNS) >= np.array(keep)[:, None]
        self.pool = DROP(self.pool, which)
        self.table = np.where(which, -1, self.table)

    @rule(rows=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    def give_back(self, rows):
        self.pool = FREE(self.pool, np.array(rows))
        self.table[np.array(rows)] = -1

    @rule(page=st.sampled_from(FREE_PAGES), more=st.integers(1, 2))
    def retain(self, page, more):
        if page in self.held():
            self.pool = RETAIN(self.pool, np.array([page] * more + [-1] * (2 - more), np.int32))
            self.pins[page] += more

    @rule(data=st.data())
    def release(self, data):
        if pinned := sorted(self.pins.elements()):
            pages = data.draw(st.lists(st.sampled_from(pinned), min_size=1, max_size=3))
            pages = list((Counter(pages) & self.pins).elements())
            asked = np.array([*pages, -1, -1, -1][:3], np.int32)
            self.pool = RELEASE(self.pool, asked)
            self.pins -= Counter(pages)

    @rule(
        rows=st.lists(st.integers(0, ROWS - 1), min_size=ROWS, max_size=ROWS),
        full=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    )
    def fork(self, rows, full):
        """Rows go on from others; those that are not full write in their last page."""
        before = self.table[rows]
        last = (before >= 0).sum(1) - 1
        last = np.where(full, -1, last)
        self.pool, copies, had = FORK(self.pool, np.array(rows, np.int32), [last.astype(np.int32)])
        self.went_apart(before, last, copies, np.array(had), emptied=True)

    @rule(full=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    def apart(self, full):
        before = self.table.copy()
        last = np.where(full, -1, (before >= 0).sum(1) - 1)
        had = WRITABLE(self.pool, last.astype(np.int32))
        self.pool, copies = APART(self.pool, last.astype(np.int32))
        self.went_apart(before, last, copies, np.array(had), emptied=False)

    def went_apart(self, before, last, copies, had, emptied):
        """Every page that is written to has one who has it, as few as can be were copied, and rows
        for which there was none keep what they had, or nothing."""
        table, where = np.array(self.pool.table), np.arange(ROWS)
        self.table = before.copy()
        written = Counter(page for page in before[where, last][last >= 0].tolist())
        held, left = self.held(), len({*FREE_PAGES} - {*self.held()})
        needed = sum(n - (held[page] == n) for page, n in written.items())
        source, target = map(np.asarray, copies)
        assert int((source >= 0).sum()) == min(needed, left) and had.all() == (needed <= left)
        for row in range(ROWS):
            if source[row] >= 0:
                assert source[row] == before[row, last[row]] and target[row] not in held
                self.table[row, last[row]] = target[row]
            elif emptied and not had[row]:
                self.table[row] = -1
        assert np.array_equal(table, self.table)
        held = self.held()
        for row in np.flatnonzero(had & (last >= 0)):
            if (page := table[row, last[row]]) >= 0:
                assert held[page] == 1 or not had.all()

    @invariant()
    def all_pages_are_accounted_for(self):
        refs, left = np.asarray(self.pool.refs), int(self.pool.left[0])
        held = self.held()
        assert [held[page] for page in FREE_PAGES] == refs.tolist()
        stack = np.asarray(self.pool.stack)[:left].tolist()
        assert len({*stack}) == left and {*stack} == self.free()
        assert np.array_equal(self.pool.table, self.table)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=400 if FULL else 100, stateful_step_count=100, deadline=None
)
