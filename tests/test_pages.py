"""Pages of a pool: the allocator against a naive model, and caches in pages."""

import dataclasses
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
from kvjax.cache.checks import BAD_PAGE, OUT_OF_PAGES
from kvjax.core.validation import CacheOverflowError
from kvjax.layouts import Dense, Paged, Ring
from tests import laws
from tests.matrix import CODECS, FULL, tiny_config

PAGES, ROWS, COLUMNS = 11, 4, 5


def _jit(name):
    method = getattr(kvjax.paging.PageAllocator, name)
    return jax.jit(lambda pool, *args: jax.tree.map(lambda x: x, method(pool, *args)))


APPEND, ALLOCATE, FORK, UNSHARE, DROP, FREE, RETAIN, RELEASE, WRITABLE = map(
    _jit,
    ("append", "allocate", "fork", "unshare", "drop", "free", "retain", "release", "writable"),
)
FREE_PAGES = range(PAGES)


def bits(count):
    """``count`` booleans, in one draw."""
    return st.integers(0, 2**count - 1).map(lambda n: (n >> np.arange(count)) % 2 == 1)


def digits(most):
    """A number up to ``most`` for every row, in one draw."""
    return st.integers(0, (most + 1) ** ROWS - 1).map(
        lambda n: n // (most + 1) ** np.arange(ROWS) % (most + 1)
    )


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model with lists as tables. Pages retained by others are counted separately."""

    def __init__(self):
        super().__init__()
        self.pool = jax.tree.map(
            jnp.asarray, kvjax.paging.PageAllocator.create(PAGES, ROWS, COLUMNS)
        )
        self.table = np.full((ROWS, COLUMNS), -1)
        self.pins = Counter()

    def held(self):
        return Counter(self.table[self.table >= 0].tolist()) + self.pins

    def free(self):
        return {*FREE_PAGES} - {*self.held()}

    def granted(self, wanted, before=0):
        """The rows that can take the ``wanted`` pages; earlier rows first."""
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

    @rule(wanted=digits(2))
    def append(self, wanted):
        columns = (self.table >= 0).sum(1)[:, None] + np.arange(2)
        asks = (np.arange(2) < wanted[:, None]) & (columns < COLUMNS)
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

    @rule(keep=digits(COLUMNS))
    def drop(self, keep):
        which = np.arange(COLUMNS) >= keep[:, None]
        self.pool = DROP(self.pool, which)
        self.table = np.where(which, -1, self.table)

    @rule(rows=bits(ROWS))
    def give_back(self, rows):
        self.pool = FREE(self.pool, rows)
        self.table = np.where(rows[:, None], -1, self.table)

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

    @rule(rows=digits(ROWS - 1), full=bits(ROWS))
    def fork(self, rows, full):
        """New rows continue others; rows whose last page is not full write to it."""
        before = self.table[rows]
        last = (before >= 0).sum(1) - 1
        last = np.where(full, -1, last)
        self.pool, copies, had = FORK(self.pool, rows.astype(np.int32), [last.astype(np.int32)])
        self.went_apart(before, last, copies, np.array(had), emptied=True)

    @rule(full=bits(ROWS))
    def apart(self, full):
        before = self.table.copy()
        last = np.where(full, -1, (before >= 0).sum(1) - 1)
        had = WRITABLE(self.pool, last.astype(np.int32))
        self.pool, copies = UNSHARE(self.pool, last.astype(np.int32))
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
        refs, left = np.asarray(self.pool.refs), int(np.asarray(self.pool.left)[0])
        held = self.held()
        assert [held[page] for page in FREE_PAGES] == refs.tolist()
        stack = np.asarray(self.pool.stack)[:left].tolist()
        assert len({*stack}) == left and {*stack} == self.free()
        assert np.array_equal(self.pool.table, self.table)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=400 if FULL else 100, stateful_step_count=100, deadline=None
)


def test_the_allocator_inside_a_loop():
    """Until it has no more, and not one page too many or too few."""

    @jax.jit
    def filled(pool):
        def more(carry):
            pool, pages, _ = carry
            columns, wanted = jnp.full((3, 1), pages), jnp.ones((3, 1), bool)
            after, got = pool.append(columns, wanted)
            return after, pages + 1, jnp.all(got)

        return jax.lax.while_loop(lambda c: c[2] & (c[1] < 8), more, (pool, 0, jnp.bool_(True)))

    pool = jax.tree.map(jnp.asarray, kvjax.paging.PageAllocator.create(10, 3, 8))
    pool, turns, had = filled(pool)
    assert (int(turns), bool(had), int(pool.left[0])) == (4, False, 0)
    assert (np.asarray(pool.table) >= 0).sum(1).tolist() == [
        4,
        3,
        3,
    ]  # the first one found one more
    assert sorted(np.asarray(pool.table)[np.asarray(pool.table) >= 0].tolist()) == [*range(10)]


def test_any_free_page_serves_so_nothing_is_moved_to_make_room():
    """After any sequence of takes and frees, a row can have all free pages."""
    rng, pool = np.random.default_rng(0), kvjax.paging.PageAllocator.create(12, 4, 12)
    pool = jax.tree.map(jnp.asarray, pool)
    for _ in range(20):
        row, pages = int(rng.integers(0, 3)), int(rng.integers(0, 5))
        pool, _ = ALLOCATE(pool, row, pages)
        pool = DROP(pool, rng.random((4, 12)) < 0.3)
    left = int(pool.left[0])
    pool, had = ALLOCATE(pool, 3, left)
    assert 0 < left < 12 and bool(had) and int(pool.left[0]) == 0


@pytest.mark.parametrize(
    ("pages", "rows", "columns", "message"),
    [(0, 1, 1, "pages must be"), (4, 0, 1, "rows must be"), (4, 2, 0, "columns must be")],
)
def test_what_an_allocator_refuses(pages, rows, columns, message):
    with pytest.raises(ValueError, match=message):
        kvjax.paging.PageAllocator.create(pages, rows, columns)
    with pytest.raises(ValueError, match="2 shares divide neither 3 pages nor 2 rows"):
        kvjax.paging.PageAllocator.create(3, 2, 1, shares=2)


# Caches in pages.

TEXT = laws.texts()


def cache_of(policy, max_len=64, rows=3, **more):
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=laws.KV)
    return kvjax.init_cache(config, policy, batch=rows, max_len=max_len, **more)


def paged(size=16, inner=None, codecs=(), pages=None, **more):
    layout = Paged(size, inner or Dense(), pages)
    return kvjax.CachePolicy(layout, *(CODECS[name] for name in codecs), **more)


def shuffled(cache, seed=0):
    """With free pages in any order."""
    rng, pool = np.random.default_rng(seed), cache.pools[0]
    stack = jnp.asarray(rng.permutation(np.asarray(pool.stack)))
    return dataclasses.replace(cache, pools=(dataclasses.replace(pool, stack=stack),))


def fed(cache, tokens, begins=(0, 0, 0), width=16):
    """The mixtures of more tokens of each row, in calls of a width, and the cache."""
    begins, left, found = np.array(begins), np.array(tokens), []
    while left.any():
        take = np.minimum(left, width)
        mixed, cache = laws.step(cache, begins, take, width, TEXT)
        found.append(mixed)
        begins, left = begins + take, left - take
    return found, cache


def used(cache):
    return kvjax.memory.page_map(cache).pools[0].used


SIZES = [
    (16, ()),
    *(pytest.param(*x, marks=pytest.mark.rare)
      for x in ((256, ("unrotated",)), (40, ()), (64, ("int8",)), (128, ()), (1024, ("int4",)))),
]  # fmt: skip


@pytest.mark.parametrize(("size", "codecs"), SIZES, ids=str)
def test_pages_of_any_size_in_any_order_are_a_dense_cache(size, codecs):
    """Bit by bit what is stored; what queries get within the order of sums."""
    dense = kvjax.CachePolicy(Dense(), *(CODECS[name] for name in codecs), block=8)
    tokens = (44, 31, 1)
    wanted, plain = fed(cache_of(dense), tokens)
    found, cache = fed(
        shuffled(cache_of(paged(size, codecs=codecs, block=8), max_len=1024)), tokens
    )
    for a, b in zip(found, wanted, strict=True):
        laws.close(a, b, 1e-6)
    kvjax.check(cache)
    back = jax.jit(functools.partial(kvjax.convert, policy=dense, max_len=64))(cache)
    laws.same_arrays(*map(laws.out_of_pages, (back, plain)))
    there = jax.jit(functools.partial(kvjax.convert, policy=cache.layers[0].policy))(plain)
    laws.same_arrays(there, cache)


def test_a_row_that_finds_no_pages_takes_nothing_and_the_others_go_on():
    cache = cache_of(paged(pages=5))
    _, cache = fed(cache, (32, 16, 16))  # 4 of 5
    mixed, after = laws.step(cache, np.array([32, 16, 16]), np.array([16, 2, 0]), 16, TEXT)
    assert np.asarray(after.length).tolist() == [48, 16, 16]
    assert np.asarray(after.status).tolist() == [0, OUT_OF_PAGES, 0]
    with pytest.raises(CacheOverflowError, match=r"no pages left for row\(s\) 1:"):
        kvjax.check(after)
    laws.close(
        mixed[0],
        laws.expected_outputs(laws.reference_outputs(("float32",), "dense"), [32], [16], 16)[0],
        1e-5,
    )
    again = kvjax.clear_status(kvjax.reset(after, np.array([True, False, False])))
    assert int(again.pools[0].left[0]) == 3
    _, again = laws.step(again, np.array([0, 16, 16]), np.array([0, 16, 2]), 16, TEXT)
    kvjax.check(again)
    assert np.asarray(again.length).tolist() == [0, 32, 18]


def test_a_table_that_names_no_page_writes_nowhere():
    _, cache = fed(cache_of(paged()), (20, 20, 20))
    pool = cache.pools[0]
    for wrong in (-1, -7, 12, 2**30):
        table = pool.table.at[1, 1].set(wrong)
        broken = dataclasses.replace(cache, pools=(dataclasses.replace(pool, table=table),))
        _, after = laws.step(broken, np.array([20] * 3), np.array([4, 4, 0]), 16, TEXT)
        assert np.asarray(after.status).tolist() == [0, BAD_PAGE, 0]
        with pytest.raises(ValueError, match=r"tables of row\(s\) 1 refer to pages outside"):
            kvjax.check(after)
        changed = np.asarray(after.layers[0].keys != cache.layers[0].keys).any((1, 2, 3))
        assert np.flatnonzero(changed).tolist() == [int(pool.table[0, 1])]


@pytest.mark.slow
def test_rows_share_pages_and_a_last_one_that_is_not_full_is_copied():
    _, cache = fed(cache_of(paged(), rows=3), (40, 32, 0))
    assert used(cache) == 5
    chosen = jax.jit(kvjax.select)(cache, jnp.array([0, 0, 1, 1, 2]))
    table = np.asarray(chosen.pools[0].table)
    assert used(chosen) == 6 and kvjax.memory.page_map(chosen).pools[0].shared == 4
    assert (table[0, :2] == table[1, :2]).all() and table[0, 2] != table[1, 2]
    assert (table[2] == table[3]).all()
    many = jax.jit(functools.partial(kvjax.repeat, times=3))(cache)
    assert used(many) == 5 + 2 and many.pools[0].pages == 3 * cache.pools[0].pages
    few = fed(cache_of(paged(pages=8)), (32, 0, 0))[1]
    again = kvjax.repeat(few, 3)  # all pages are full: not one array is another
    assert again.layers[0].keys is few.layers[0].keys and used(again) == 2
    # What one of them writes, the others don't see.
    _, moved = laws.step(chosen, np.zeros(5, int), np.array([3, 0, 3, 0, 3]), 16, TEXT, [0] * 5)
    for row, other in ((1, 0), (3, 1)):
        for a, b in zip(kvjax.read(moved, 0), kvjax.read(cache, 0), strict=True):
            held = np.asarray(kvjax.read(cache, 0)[2])[other] >= 0
            a, b = np.asarray(a)[row], np.asarray(b)[other]
            assert np.array_equal(a[..., held, :] if a.ndim > 1 else a[held],
                                  b[..., held, :] if b.ndim > 1 else b[held])  # fmt: skip


@pytest.mark.slow
def test_caches_of_one_pool_are_joined_in_it():
    _, cache = fed(cache_of(paged(pages=20)), (40, 32, 5))
    parts = [kvjax.select(cache, rows) for rows in ([0], [1, 2])]
    joined = kvjax.concatenate(parts)  # outside jit, where arrays can be seen to be the same
    assert joined.layers[0].keys.shape == cache.layers[0].keys.shape and used(joined) == 6
    laws.same_arrays(joined, cache)
    twice = jax.jit(lambda c: kvjax.concatenate([c, c]))(cache)
    assert used(twice) == 6 + 2  # those that are not full
    apart = jax.jit(lambda *c: kvjax.concatenate(c))(cache, cache)
    assert used(apart) == 12 and apart.pools[0].pages == 40


@pytest.mark.slow
def test_a_rewind_gives_pages_back_and_leaves_what_others_have():
    _, cache = fed(cache_of(paged()), (40, 1, 1))
    cache = kvjax.select(cache, [0, 0, 0])
    assert used(cache) == 5
    back = jax.jit(kvjax.rewind)(cache, jnp.array([0, 8, 30]))  # to 40, 32 and 10
    table = np.asarray(back.pools[0].table)
    assert (table >= 0).sum(1).tolist() == [3, 2, 1]
    assert used(back) == 4 and table[2, 0] != table[0, 0] == table[1, 0]
    _, after = laws.step(back, np.array([40, 32, 10]), np.array([4, 4, 16]), 16, TEXT, [0, 0, 0])
    kvjax.check(after)
    found = [np.asarray(x) for x in kvjax.read(after, 0)]
    first = [np.asarray(x) for x in kvjax.read(cache, 0)]
    for row, held in ((0, 40), (1, 32), (2, 10)):
        assert np.array_equal(found[0][row, :, :held], first[0][row, :, :held])
    full = cache_of(paged(pages=3), rows=2)
    _, full = laws.step(full, [0, 0], [16, 0], 16, TEXT, [0, 0])
    full = kvjax.select(full, [0, 0])
    _, full = laws.step(full, [16, 16], [16, 16], 16, TEXT, [0, 0])
    refused = kvjax.rewind(full, np.array([20, 0]))  # no page to copy to, though one comes free
    assert np.asarray(refused.length).tolist() == [32, 32]
    assert np.asarray(refused.status).tolist() == [OUT_OF_PAGES, 0]


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [(), ("int8",)], ids=["raw", "int8"])
def test_pages_on_a_mesh(codecs):
    """Rows that go to other devices, and to another mesh, are what they are on one."""
    tokens = (40, 32, 5, 16)
    text = [np.concatenate([x, x[:1]]) for x in TEXT]
    policy, found = paged(16, codecs=codecs, block=8, pages=24), []

    def feed(cache, begins, take, of=None):
        return laws.step(cache, np.array(begins), np.array(take), 16, text, of)

    for over in (None, {"data": 2, "tensor": 2}):
        mesh = None if over is None else kvjax.make_mesh(**over)
        cache, begins, seen = cache_of(policy, rows=4, mesh=mesh), np.zeros(4, int), []
        for start in (0, 16, 32):
            take = np.clip(np.array(tokens) - start, 0, 16)
            mixed, cache = feed(cache, begins, take)
            begins = begins + take
        cache = jax.jit(kvjax.select)(cache, jnp.array([3, 0, 0, 1]))  # from share to share
        mixed, cache = feed(cache, [16, 40, 40, 32], [4, 4, 9, 16], [3, 0, 0, 1])
        seen.append(mixed)
        twice = jax.jit(functools.partial(kvjax.repeat, times=2))(cache)
        both = jax.jit(lambda *c: kvjax.concatenate(c))(cache, cache)
        order = [3, 3, 0, 0, 0, 0, 1, 1], [3, 0, 0, 1, 3, 0, 0, 1]
        length = np.array([20, 44, 49, 48])
        for many, of, at in ((twice, order[0], length.repeat(2)), (both, order[1], [*length] * 2)):
            seen.append(feed(many, at, [2] * 8, of)[0])
        cache = kvjax.migrate(cache, mesh=over and kvjax.make_mesh(data=4))
        mixed, cache = feed(cache, length, [3, 0, 2, 1], [3, 0, 0, 1])
        cache = kvjax.migrate(cache, mesh=None)
        seen += [mixed, feed(cache, length + np.array([3, 0, 2, 1]), [1] * 4, [3, 0, 0, 1])[0]]
        kvjax.check(cache)
        found.append(seen)
    for one, other in zip(*found, strict=True):
        laws.close(other, one, 1e-6)


REWIND, REWINDABLE = jax.jit(kvjax.rewind), jax.jit(kvjax.rewindable)


@pytest.mark.slow
@pytest.mark.parametrize(("sinks", "codecs"), [(0, ()), (3, ()), (0, ("int8",))], ids=str)
def test_a_window_gives_its_pages_back(sinks, codecs):
    """As it moves, and none that is seen after as many tokens are taken back as can be."""
    ring, codes = Ring(20, sinks, slack=15), [CODECS[name] for name in codecs]
    policies = paged(16, ring, codecs, block=8), kvjax.CachePolicy(ring, *codes, block=8)
    caches, most = [cache_of(policy, max_len=None) for policy in policies], []
    text, rng = [x[:, :, :16] for x in TEXT], np.random.default_rng(0)
    for turn in range(20):
        take = np.array([16, rng.integers(1, 17), turn % 2], np.int32)
        found = [laws.call(cache, *text, take) for cache in caches]
        real = (np.arange(16) < take[:, None])[:, None, :, None]
        laws.close(*(np.where(real, np.asarray(mixed), 0) for mixed, _ in found), 1e-5)
        back = np.min([np.asarray(REWINDABLE(cache)) for _, cache in found], axis=0)
        caches = [REWIND(cache, np.minimum(back, 15).astype(np.int32)) for _, cache in found]
        if turn % 3:  # not all the way
            caches = [cache for _, cache in found]
        most.append(used(caches[0]))
    for cache in caches:
        kvjax.check(cache)
    assert np.asarray(caches[0].length).min() < 20 < 100 < np.asarray(caches[0].length).max()
    columns = caches[0].pools[0].table.shape[1]
    assert max(most) <= 2 * columns + 1


def test_kinds_of_layers_have_pools_of_their_own():
    config = tiny_config(num_hidden_layers=3, windows=(None, 20, 20))
    hybrid = kvjax.init_cache(config, kvjax.policy("paged", page_size=16), batch=2, max_len=640)
    full, sliding = kvjax.memory.page_map(hybrid).pools
    assert (full.layers, sliding.layers) == ((0,), (1, 2))
    assert (full.pages, sliding.pages) == (80, 8) and sliding.page_bytes == 2 * full.page_bytes


def test_slots_that_hold_nothing_are_few():
    """At the default size, of texts of a thousand tokens to eight thousand."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1000, 8000, 64)
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=1, head_dim=2)
    cache = kvjax.init_cache(config, "paged", batch=64, max_len=8192)

    @jax.jit
    def held(cache):
        numbers = jnp.zeros((64, 1, 8000, 2))
        cache = kvjax.append(cache, 0, numbers, numbers, lengths=jnp.asarray(lengths))
        return kvjax.advance(cache, 8000)

    (pool,) = kvjax.memory.page_map(held(cache)).pools
    assert pool.used == np.sum(-(-lengths // 256))
    assert pool.wasted == pytest.approx(1 - lengths.sum() / (256 * pool.used))
    assert pool.wasted < 0.04


@pytest.mark.slow
def test_a_map_of_pages(tmp_path):
    _, cache = fed(cache_of(paged(pages=70)), (40, 20, 0))
    cache = kvjax.select(cache, [0, 0, 1])
    pool = cache.pools[0].retain(cache.pools[0].stack[:1])
    cache = dataclasses.replace(cache, pools=(pool,))
    lines = str(kvjax.memory.page_map(cache)).splitlines()
    assert lines[0].startswith(
        "layers 0: 70 pages of 16 tokens, 2.05 kB each; 7 used, 2 shared, 63"
    )
    assert lines[1] == "+" * 2 + "0221" + "." * 58 or len(lines[1]) == 64
    assert sorted((lines[1] + lines[2]).replace(".", "")) == sorted("++0221=")
    pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    kvjax.memory.page_map(cache).plot(tmp_path / "pages.png", "Pages")
    assert (tmp_path / "pages.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="the cache has no pages"):
        kvjax.memory.page_map(cache_of(kvjax.CachePolicy()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: cache_of(paged(20)),
            "page_size=20: pages have 16 to 1024 tokens, a multiple of 8",
        ),
        (lambda: cache_of(paged(2048)), "page_size=2048"),
        (
            lambda: cache_of(paged(24, codecs=("int8",), block=16)),
            "page_size=24 must be a multiple of 16",
        ),
        (lambda: cache_of(paged(pages=0)), "pages must be an integer >= 1, got 0"),
        (
            lambda: cache_of(paged(), rows=4, mesh=kvjax.make_mesh(sequence=2)),
            "pages can't be divided along sequence",
        ),
    ],
)
def test_what_pages_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()
