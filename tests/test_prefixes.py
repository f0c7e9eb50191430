"""Prefix trees: a hit equals recomputation, bit for bit, and every page is returned."""

import dataclasses
import functools
import itertools
import types
from collections import defaultdict
from contextlib import nullcontext

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kvjax
from kvjax.codecs import Raw
from kvjax.core.target import Target, tracing_for
from kvjax.core.validation import CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import GenerationOptions
from kvjax.generation.request import prepare_request, prompt_chunks
from kvjax.generation.session import Session
from kvjax.layouts import Paged, Ring
from kvjax.models.loading import GenerationDefaults
from kvjax.prefixes import sequences as cached_sequences
from kvjax.prefixes.radix import TIERS
from tests.alive import alive
from tests.matrix import CODECS, FULL, tiny_config, tiny_model
from tests.threads import together

# Conversations: cold equals warm.

CHUNK, MOST = 16, 192


@functools.cache
def small(**changes):
    model, params = tiny_model(**changes)
    defaults = GenerationDefaults(eos_token_ids=())
    return LanguageModel(model.config, params, None, defaults, model, "a test")


def ring(size, window, sinks, slack, *codecs, **more):
    layout = Paged(size, Ring(window, sinks=sinks, slack=slack))
    return kvjax.CachePolicy(layout, *codecs, block=8, **more)


def whole(*codecs, size=16, **more):
    return kvjax.CachePolicy(Paged(size), *codecs, block=8, **more)


INT8 = CODECS["int8"]
POLICIES = {
    "raw": whole(),
    "int8": whole(INT8, INT8),
    "4 and 2 bits": whole(CODECS["int4"], CODECS["int2"]),
    "raw sinks": whole(CODECS["mixed"], CODECS["rotated-centered"], sinks=3),
    "sinks": ring(16, 40, 4, 15),
    "sinks of 8 bits": ring(16, 40, 4, 23, INT8, INT8),
    "hybrid": kvjax.policies.Hybrid(whole(size=32), ring(16, None, 0, 15)),
    "hybrid of slots": kvjax.policies.Hybrid(whole(), kvjax.CachePolicy(Ring(slack=15))),
    "host": whole(placement=kvjax.Host()),
}
COVERED = ("int8", "hybrid")


def tree_of(lm, policy, **more):
    given = {"pages": 13, "max_len": MOST, "prefill_chunk": CHUNK}
    return kvjax.PrefixTree(lm, policy, **given | more)


def after(lm, prompts, **settings):
    """The logits after prompts, the tokens that hits saved, and the generated tokens."""
    request = prepare_request(
        lm, prompts, GenerationOptions(max_new_tokens=6, eos_token_ids=(), **settings)
    )
    session = Session(lm, request)
    session.start()
    for chunk in prompt_chunks(request, session.prefix_hits):
        session.prefill(chunk)
    logits = np.array(session.logits)
    session.close(prompts)
    result = kvjax.generate(lm, prompts, max_new_tokens=6, eos_token_ids=(), **settings)
    return logits, int(session.prefix_hits.sum()), result.tokens


def conversations(seed=0):
    """The prompts of three conversations with three turns each, interleaved. A prompt starts with
    all earlier turns of its conversation."""
    rng = np.random.default_rng(seed)
    some = lambda n: rng.integers(0, 61, n).tolist()  # noqa: E731
    system, turns = some(40), []
    for _group in range(3):
        text = system + some(int(rng.integers(5, 20)))
        told = []
        for _turn in range(3):
            told.append(text)
            text = text + some(int(rng.integers(20, 40)))
        turns.append(told)
    order = rng.permutation(np.repeat(np.arange(3), 3))
    left = [iter(told) for told in turns]
    return [next(left[group]) for group in order]


OTHERS = [pytest.param(n, marks=pytest.mark.rare) for n in POLICIES if n not in COVERED]


@pytest.mark.slow(but=("hybrid",))
@pytest.mark.parametrize("name", [*COVERED, *OTHERS])
def test_cold_equals_warm_bit_for_bit(name, tmp_path):
    """With small tiers: pages and checkpoints move to the host, to disk, and back."""
    lm = small()
    sizes = tree_of(lm, POLICIES[name])
    room = max(
        sizes.pool_config.checkpoint_bytes, *(kind.page_bytes for kind in sizes.pool_config.groups)
    )
    tree = tree_of(lm, POLICIES[name], host_memory=room, folder=tmp_path, checkpoint_every=2)
    saved, tiers = 0, set()
    for prompt in [*conversations(), *conversations(1)]:
        found, hit, tokens = after(lm, [prompt], prefix_cache=tree)
        wanted, none, others = after(lm, [prompt], **tree.settings)
        assert none == 0 and np.array_equal(found, wanted) and tokens == others
        saved += hit
        stats = tree.stats()
        tiers |= {tier for tier, taken in stats.bytes.items() if taken}
        assert stats.used_pages == (0,) * len(stats.used_pages)
    assert saved > 150 and tiers == {"device", "host", "disk"}
    tree.clear()
    assert not any(tmp_path.rglob("*.npz"))


@pytest.mark.slow
def test_a_tree_that_forgets_has_one_pool_at_a_time(monkeypatch):
    tree, made, held = tree_of(small(), whole()), cached_sequences.new_layer, []

    def new_layer(*given):
        held.append(sum(x.nbytes for x in alive()))
        return made(*given)

    monkeypatch.setattr(cached_sequences, "new_layer", new_layer)
    before, pool = sum(x.nbytes for x in alive()), tree.sequences.pool.nbytes
    tree.clear()
    assert held[0] == before - pool
    assert sum(x.nbytes for x in alive()) == before


def test_a_hit_ends_where_a_chunk_of_prompts_did():
    """Not inside a chunk, and not after tokens of decode steps."""
    lm, rng = small(), np.random.default_rng(12)
    tree = tree_of(lm, POLICIES["raw"], pages=24, prefill_chunk=32)
    prompt = rng.integers(0, 61, 75).tolist()
    result = kvjax.generate(lm, [prompt], max_new_tokens=30, eos_token_ids=(), prefix_cache=tree)
    for text, hit in ((prompt + result.tokens[0], 64), ([*prompt[:60], 1, 2, 3], 32)):
        found, known, _ = after(lm, [text], prefix_cache=tree)
        wanted, _, _ = after(lm, [text], **tree.settings)
        assert known == hit and np.array_equal(found, wanted)


def test_what_was_not_used_for_longest_leaves_first():
    lm, rng = bare(), np.random.default_rng(13)
    tree = tree_of(lm, whole(), pages=8, host_memory=0)
    one, two, three = (tuple(rng.integers(0, 9, 49).tolist()) for _ in range(3))
    assert [asked(tree, lm, [text]) for text in (one, two, one, three, one)] == [
        [0], [0], [48], [0], [48]
    ]  # fmt: skip
    assert asked(tree, lm, [two]) < [48]


@pytest.mark.parametrize("name", ["int8", "raw", "sinks", "hybrid"])
@pytest.mark.rare
def test_a_tree_on_a_mesh_of_heads(name):
    """The least recently used pages are swapped out, and swapped in again."""
    lm, rng = small().on(kvjax.make_mesh(tensor=2)), np.random.default_rng(11)
    pages = {"sinks": 10, "hybrid": 6}.get(name, 5)
    tree = tree_of(lm, POLICIES[name], pages=pages, max_len=64)
    one, two, three = (rng.integers(0, 61, 50).tolist() for _ in range(3))
    hits, away = [], []
    for prompt in (one, two, three, one):
        found, hit, _ = after(lm, [prompt], prefix_cache=tree)
        wanted, _, _ = after(lm, [prompt], **tree.settings)
        assert np.array_equal(found, wanted)
        hits.append(hit)
        away.append(tree.stats().bytes["host"])
    assert hits == [0, 0, 0, 32 if name == "hybrid" else 48]
    assert away[0] < away[2]


@pytest.mark.rare
def test_rows_of_one_request_begin_together():
    """Results are equal bit for bit even if rows differ in length."""
    lm, rng = small(), np.random.default_rng(3)
    tree = tree_of(lm, POLICIES["int8"], pages=48, checkpoint_every=1)
    base = rng.integers(0, 61, 90).tolist()
    hits = []
    for lengths in ((70, 40), (85, 70), (90, 41), (33, 90)):
        prompts = [base[: n - 3] + rng.integers(0, 61, 3).tolist() for n in lengths]
        found, hit, tokens = after(lm, prompts, prefix_cache=tree)
        wanted, _, others = after(lm, prompts, **tree.settings)
        assert np.array_equal(found, wanted) and tokens == others
        hits.append(hit)
    assert hits == [0, 128, 64, 32]
    # Another number of rows uses other programs.
    assert after(lm, prompts[:1], prefix_cache=tree)[1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raw", pytest.param("int8", marks=pytest.mark.rare)])
def test_longer_hits_where_bits_may_differ(name):
    lm, rng = small(), np.random.default_rng(4)
    tree = tree_of(lm, POLICIES[name], exact_prefix=False)
    prompt = rng.integers(0, 61, 45).tolist()
    first = kvjax.generate(lm, [prompt], max_new_tokens=40, prefix_cache=tree)
    assert first.cache is None and first.stats.cached_tokens == 0
    text = prompt + first.tokens[0] + [5, 6, 7]
    second = [text, [*prompt[:30], 1, 2]]
    found, hit, _ = after(lm, second, prefix_cache=tree)
    wanted, _, _ = after(lm, second, **tree.settings)
    # Generated tokens are cached too, and each row has its own hit.
    assert hit == 80 + (16 if name == "raw" else 0)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-4)


# The contents of pages, and their owners.


@functools.cache
def bare(windows=(None,)):
    """A model that is never run: only its shape is used."""
    config = tiny_config(num_hidden_layers=len(windows), windows=windows, num_key_value_heads=1)
    return types.SimpleNamespace(config=config, params={"w": jnp.zeros(1)}, mesh=None)


@functools.partial(jax.jit, donate_argnums=0)
def feed(cache, numbers, lengths):
    """Append keys that encode the sequence up to each position."""
    keys = jnp.broadcast_to(numbers[:, None, :, None], (*numbers.shape[:1], 1, numbers.shape[1], 8))
    for layer in range(len(cache.layers)):
        cache = kvjax.append(cache, layer, keys, -keys, lengths=lengths)
    return kvjax.advance(cache, numbers.shape[1])


@functools.cache
def names(text):
    """A unique number for each prefix of a sequence, used as its key."""
    return np.array([hash(text[: n + 1]) % 2**24 for n in range(len(text))], np.float32)


@functools.cache
def pages_in(layout, written):
    return np.asarray(layout.pages_in(jnp.array([written], jnp.int32)))[0]


def rests(cache, row=0):
    """The key at each position of a row, found through the page tables; None without a page."""
    found = {}
    length, written = int(np.asarray(cache.length)[row]), np.asarray(cache.written)[row].tolist()
    for entry, held in enumerate(cache.layers):
        page_group, table = held.policy.page_group, np.asarray(cache.table(entry))[row]
        pages, size = pages_in(page_group.layout, written[entry]), page_group.layout.page_size
        for page, number in zip(pages.tolist(), table.tolist(), strict=True):
            if number >= 0:
                keys = np.asarray(held.keys)[number, 0, :, 0]
                positions = range(page * size, min((page + 1) * size, length))
                found |= {(entry, p): keys[p - page * size] for p in positions}
    return found


def asked(tree, lm, texts, new=4, keep=True, tenant=None, look=True):
    """Run a request with keys that identify their prefix, and check them. Returns the hits."""
    lease = tree.lease(lm, [list(text) for text in texts], new=new, tenant=tenant)
    cache, held = lease.take_cache(), lease.hits.copy()
    lengths = np.array([len(text) for text in texts])
    while (held < lengths).any():
        count = np.minimum(lengths - held, CHUNK).astype(np.int32)
        numbers = np.zeros((len(texts), CHUNK), np.float32)
        for row, text in enumerate(texts):
            numbers[row, : count[row]] = names(text)[held[row] : held[row] + count[row]]
        cache, held = feed(cache, numbers, count), held + count
        cache = lease.after_chunk(cache, held)
    for row, text in enumerate(texts):
        numbers, first = names(text), int(lease.hits[row])
        found = rests(cache, row) if look else {}
        for (_, position), key in found.items():
            assert key == numbers[position]
        assert not (first and look) or {p for _, p in found} >= {first - 1}
    lease.finish(cache, [list(text) for text in texts] if keep else None)
    return lease.hits.tolist()


def accounted(tree):
    """Free, used and cached pages, counted separately, add up to all pages."""
    stats = tree.stats()
    for kind, counts in enumerate(tree.sequences.pool.allocators):
        kept = [
            page.page
            for node in tree.sequences.radix
            for page in node.pages[kind]
            if page is not None and page.page >= 0
        ]
        assert len({*kept}) == len(kept) == stats.cached_pages[kind]
        assert len({*counts.free}) == len(counts.free) == stats.free_pages[kind]
        assert not {*kept} & {*counts.free}
        assert len(kept) + len(counts.free) == len(counts.refs) and stats.used_pages[kind] == 0
        assert counts.refs.sum() == len(kept) and {*counts.refs.tolist()} <= {0, 1}
    every = [
        kept
        for node in tree.sequences.radix
        for tier in ("host", "disk")
        for kept in node.entries(tier)
    ]
    for tier in ("host", "disk"):
        taken = sum(kept.nbytes for kept in every if kept.tier == tier)
        assert (
            taken
            == stats.bytes[tier]
            == tree.sequences.tiers.bytes[tier]
            <= tree.sequences.tiers.limits[tier]
        )
    assert not any(node.lock_count for node in tree.sequences.radix)


ALPHABET = [tuple(np.random.default_rng(n).integers(0, 2, 3 * CHUNK).tolist()) for n in range(4)]
"""Sequences are concatenations of these, so that many share prefixes."""


class TreeMachine(RuleBasedStateMachine):
    """Compares a tree with the set of all computed prefixes. As long as nothing has been evicted, a
    hit is the longest of them, and it never belongs to another tenant or to other weights."""

    pages, memory = 400, 2**30

    @initialize(window=st.booleans(), every=st.integers(1, 3))
    def begin(self, window, every):
        windows, layout = ((None,), Paged(16)) if not window else ((None, 20), None)
        policy = "paged" if window else kvjax.CachePolicy(layout)
        if window:
            policy = kvjax.policy("paged", page_size=16, slack=15)
        self.lm = bare(windows)
        self.tree = tree_of(
            self.lm, policy, pages=self.pages, host_memory=self.memory, checkpoint_every=every
        )
        self.known, self.states = defaultdict(set), defaultdict(set)
        self.every, self.version = every * 16, 0

    @rule(
        texts=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=3),
                                 st.integers(1, 140)), min_size=1, max_size=2),
        tenant=st.sampled_from([None, None, "a"]), keep=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def ask(self, texts, tenant, keep):
        texts = [tuple(itertools.chain(*(ALPHABET[n] for n in which)))[:n] for which, n in texts]
        key = tenant, self.version, len(texts)
        wanted = [self.expected(key, text) for text in texts]
        common = min(wanted)
        while common and not all(self.there(key, text[:common]) for text in texts):
            common -= CHUNK
        hits = asked(self.tree, self.lm, texts, keep=keep, tenant=tenant)
        assert len({*hits}) == 1 and hits[0] % CHUNK == 0
        if self.tree.sequences.tiers.dropped:
            assert hits[0] <= common
        else:
            assert hits[0] == common
        if keep:
            for text in texts:
                self.computed(key, text, hits[0])

    def there(self, key, text):
        return (
            text in self.states[key]
            if self.tree.pool_config.needs_checkpoints
            else text in self.known[key]
        )

    def expected(self, key, text):
        ends = range((len(text) - 1) // CHUNK * CHUNK, 0, -CHUNK)
        return next((n for n in ends if self.there(key, text[:n])), 0)

    def computed(self, key, text, hit):
        """Checkpoints are kept at the last chunks, where others diverge, and in between."""
        ends = [n for n in range(CHUNK, len(text) + 1, CHUNK)]
        branch = max((n for n in ends if n < len(text) and text[:n] in self.known[key]), default=0)
        last = (len(text) - 1) // CHUNK * CHUNK  # where the same prompt can resume
        kept = {branch, last, ends[-1]} if ends else set()
        mine = {n for n in ends if n > hit and (n % self.every == 0 or n in kept)}
        self.states[key] |= {text[:n] for n in mine}
        self.known[key] |= {text[:n] for n in ends}

    @rule()
    def other_weights(self):
        self.version += 1
        self.tree.weight_version = self.version

    @rule()
    def forget(self):
        self.tree.clear()
        self.known.clear()
        self.states.clear()

    @invariant()
    def every_page_is_accounted_for(self):
        if hasattr(self, "tree"):
            accounted(self.tree)


class CrowdedMachine(TreeMachine):
    """With few pages and little host memory, so that most sequences are evicted."""

    pages, memory = 20, 6_000


TestTreeMachine = TreeMachine.TestCase
TestCrowdedMachine = pytest.mark.rare(CrowdedMachine.TestCase)
TestTreeMachine.settings = TestCrowdedMachine.settings = settings(
    max_examples=200 if FULL else 30, stateful_step_count=100, deadline=None
)


@pytest.mark.rare
def test_two_thousand_requests_leave_no_page_behind():
    """Requests of one row and of three, some of them not kept, in pools that are too small."""
    lm, rng = bare((None, 20)), np.random.default_rng(0)
    tree = tree_of(
        lm, kvjax.policy("paged", page_size=16, slack=15), pages=40, host_memory=20_000,
        checkpoint_every=2,
    )  # fmt: skip
    hits = 0
    for _ in range(2000):
        texts = []
        for _row in range(rng.choice([1, 1, 1, 3])):
            which, length = rng.zipf(1.5, 3) % 4, int(rng.integers(1, 140))
            texts.append(tuple(itertools.chain(*(ALPHABET[n] for n in which)))[:length])
        found = asked(tree, lm, texts, keep=rng.random() < 0.9)
        hits += sum(found)
    accounted(tree)
    assert hits > 20_000 and tree.sequences.tiers.dropped > 100
    for node in list(tree.sequences.radix.roots.values()):
        tree.sequences.tiers.remove(node)
    assert tree.stats().free_pages == (40, 40) and tree.stats().bytes == dict.fromkeys(TIERS, 0)


def test_a_text_that_is_gone_on_from_stays():
    """A request does not evict the prefix that it has matched."""
    lm, rng = bare(), np.random.default_rng(1)
    tree = tree_of(lm, whole(), pages=10, max_len=160, host_memory=0)
    old, new = (tuple(rng.integers(0, 9, 48).tolist()) for _ in range(2))
    asked(tree, lm, [old])
    asked(tree, lm, [new])
    # All pages but those of its prefix, which was used least recently.
    hits = asked(tree, lm, [old + tuple(rng.integers(0, 9, 100).tolist())], new=12)
    assert hits == [48] and tree.stats().evicted >= 3
    accounted(tree)


def test_pages_of_other_sizes_and_prompts_that_end_anywhere():
    """One model with pages of 16 and of 48 tokens: hits end where both kinds of pages end."""
    lm = bare((None, 20))
    policies = [
        whole(size=48),
        kvjax.CachePolicy(Paged(16, Ring(20, slack=15))),
    ]
    tree = tree_of(lm, policies, pages=40)
    text = tuple(np.random.default_rng(2).integers(0, 9, 150).tolist())
    assert tree.pool_config.node_tokens == 48 and [
        kind.page_tokens for kind in tree.pool_config.groups
    ] == [48, 16]
    for length, hit in ((47, 0), (48, 0), (49, 48), (96, 48), (97, 96), (150, 96), (150, 144)):
        assert asked(tree, lm, [text[:length]]) == [hit]
        accounted(tree)


# Generation.


def texts_of(result):
    return [row for row in result.tokens]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["slots", *(pytest.param(name, marks=pytest.mark.rare) for name in ("raw", "int8"))]
)
def test_samples_of_one_prompt_are_rows_of_their_own(name):
    lm = small()
    policy = "static" if name == "slots" else POLICIES[name]
    prompt, other = np.random.default_rng(5).integers(0, 61, (2, 37)).tolist()
    more = {"temperature": 1.0, "repetition_penalty": 1.2, "max_new_tokens": 7, "prefill_chunk": 16,
            "max_len": 64, "eos_token_ids": ()}  # fmt: skip
    found = kvjax.generate(lm, [prompt, other], n=3, seed=3, cache=policy, **more)
    alone = kvjax.generate(lm, [*[prompt] * 3, *[other] * 3], seed=3, cache=policy, **more)
    assert found.tokens == alone.tokens and len({*map(tuple, found.tokens[:3])}) == 3
    assert found.stats.prompt_tokens == 2 * 37 and found.cache.batch == 6
    if name == "raw":
        shared, _ = (kvjax.memory.page_map(each.cache).pools[0] for each in (found, alone))
        assert shared.shared == 2 * 2  # 32 of 37 tokens
        tree = tree_of(lm, policy, pages=40)
        more = {key: more[key] for key in more.keys() - {"max_len", "prefill_chunk"}}
        both = [
            kvjax.generate(lm, [prompt, other], n=3, seed=3, prefix_cache=tree, **more)
            for _ in range(2)
        ]
        assert both[0].tokens == both[1].tokens == found.tokens
        assert [each.stats.cached_tokens for each in both] == [0, 64]
        accounted(tree)


@pytest.mark.slow
def test_samples_find_pages_for_what_their_tails_held():
    settings = {"n": 3, "max_new_tokens": 18, "max_len": 96, "prefill_chunk": 16}
    policy = whole(INT8, INT8, size=32)
    found = kvjax.generate(small(), [list(range(60)) + [1] * 4], cache=policy, **settings)
    assert [len(row) for row in found.tokens] == [18] * 3
    pool = kvjax.memory.page_map(found.cache).pools[0]
    assert len(pool.owners) == 1 + 3 * 2


@pytest.mark.rare
def test_without_a_cache_and_on_from_one():
    lm = small()
    prompt, more = list(range(20)), {"max_new_tokens": 5, "eos_token_ids": (), "n": 2}
    wanted = kvjax.generate(lm, [prompt], temperature=1.0, **more)
    assert kvjax.generate(lm, [prompt], temperature=1.0, use_cache=False, **more).tokens == (
        wanted.tokens
    )
    begun = kvjax.generate(lm, [prompt[:8]], max_new_tokens=1, max_len=64, eos_token_ids=())
    again = kvjax.generate(lm, [prompt[8:]], cache=begun.cache, temperature=1.0, **more)
    assert again.tokens == wanted.tokens and again.cache.length.tolist() == [24, 24]


@pytest.mark.slow
def test_whose_texts_they_are():
    """Sequences of another tenant or of other weights are not matched."""
    lm, prompt = small(), list(range(40))
    tree = tree_of(lm, POLICIES["raw"])
    ask = functools.partial(kvjax.generate, max_new_tokens=2)
    cached = lambda lm, tree: ask(lm, [prompt], prefix_cache=tree).stats.cached_tokens  # noqa: E731
    every = [cached(lm, each) for each in (tree, tree, tree.for_tenant("a"), tree.for_tenant("a"))]
    assert every == [0, 32, 0, 32]
    trained = dataclasses.replace(lm, params=jax.tree.map(lambda x: x + 1, lm.params))
    with pytest.raises(ValueError, match="used weight_version=0 with other parameters"):
        cached(trained, tree)
    tree.weight_version = "step 1"
    assert [cached(trained, tree), cached(trained, tree)] == [0, 32]
    wanted = ask(trained, [prompt], **tree.settings).tokens
    assert ask(trained, [prompt], prefix_cache=tree).tokens == wanted
    with pytest.raises(ValueError, match="made for another model"):
        cached(small(num_hidden_layers=1, windows=(None,)), tree)
    stats = tree.stats()
    assert (stats.prompts, stats.hits, stats.cached_tokens) == (
        7,
        4,
        128,
    ) and stats.hit_rate == 128 / 280


def streaming(policy):
    """A model, its tree, and an unfinished stream that uses the tree's pages."""
    lm = small()
    tree = tree_of(lm, POLICIES[policy])
    running = kvjax.stream(lm, [list(range(40))], max_new_tokens=20, prefix_cache=tree)
    next(running)
    return lm, tree, running


@pytest.mark.slow
def test_a_stream_that_is_let_go_gives_its_pages_back():
    lm, tree, running = streaming("raw")
    with pytest.raises(ValueError, match="pages are leased to an unfinished stream"):
        kvjax.generate(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=2)
    del running
    result = kvjax.generate(lm, [list(range(40))], prefix_cache=tree, max_new_tokens=2)
    assert result.stats.cached_tokens == 0  # an unfinished stream adds nothing
    accounted(tree)
    # If a cache is lost, the tree's pages are lost too.
    lease = tree.lease(lm, [list(range(40))], new=2)
    jax.tree.map(lambda x: x.delete(), lease.take_cache())
    lease.finish(None, None)
    assert tree.stats().cached_pages == (0,) and not tree.stats().sequences
    assert kvjax.generate(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=2).tokens


def test_batch_after_batch_finds_what_went_before():
    lm, rng = small(), np.random.default_rng(6)
    tree = tree_of(lm, POLICIES["raw"])
    base = rng.integers(0, 61, 40).tolist()
    batches = [[base + rng.integers(0, 61, 4).tolist()] for _ in range(3)]
    found = list(kvjax.generate_batches(lm, batches, prefix_cache=tree, max_new_tokens=3))
    assert [each.stats.cached_tokens for each in found] == [0, 32, 32]
    for each, prompts in zip(found, batches, strict=True):
        assert each.tokens == kvjax.generate(lm, prompts, max_new_tokens=3, **tree.settings).tokens


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"policy": "static"}, "give a policy with paged layers"),
        (
            {"policy": [kvjax.CachePolicy(Paged(16)), "static"]},
            "layer 1 keeps whole sequences out",
        ),
        ({"policy": kvjax.policies.Auto("paged", 2**20)}, "moves layers while it runs"),
        ({"pages": None}, "give either pages=, or memory="),
        ({"memory": "1MB"}, "give either pages=, or memory="),
        ({"pages": None, "memory": 8}, "memory is 8 bytes, but one page of all layers takes 4096"),
        (
            {"policy": kvjax.CachePolicy(Paged(16, pages=5))},
            "policy sets the pages of some pools",
        ),
        ({"max_len": 10**7}, "max_len is 10000000, but the model has 512 positions"),
        ({"exact_prefix": "no"}, "exact_prefix must be True or False, got 'no'"),
        (
            {"weight_version": 1.0},
            "weight_version is 1.0; it must be a string, an integer, or a tuple",
        ),
        ({"weight_version": ("a", True)}, "weight_version is True; it must be"),
        ({"pages": 0}, "pages must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"host_memory": -1}, "host_memory"),
    ],
)
def test_what_a_tree_refuses(more, message):
    lm = small()
    if "max_len" in more:  # a model with a position limit
        config = types.SimpleNamespace(**vars(lm.config), position_limit=512)
        lm = types.SimpleNamespace(config=config, params={}, mesh=None)
    with pytest.raises(ValueError, match=message):
        tree_of(lm, **{"policy": POLICIES["raw"]} | more)


@pytest.mark.slow
def test_what_a_request_with_a_tree_refuses():
    lm = small()
    tree = tree_of(lm, POLICIES["raw"], pages=4)
    for more, message in (
        ({"cache": "dynamic"}, "has its own policy"),
        ({"max_len": 100}, "max_len is 100, but the prefix tree was made with 192"),
        ({"prefill_chunk": 100}, "prefill_chunk is 100, but the prefix tree was made with 16"),
        ({"use_cache": False}, "together with use_cache=False"),
        ({"prefix_cache": "tree"}, "prefix_cache must be a PrefixTree"),
        ({"n": 0}, "n must be"),
        ({"max_new_tokens": 80}, "pool has 4 in all"),
        ({"max_new_tokens": 300}, "max_len is 192"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.generate(lm, [[1, 2]], **{"prefix_cache": tree, "max_new_tokens": 2} | more)
    assert kvjax.generate(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=40).tokens
    accounted(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["int8", *(pytest.param(name, marks=pytest.mark.rare) for name in ("raw", "hybrid"))]
)
def test_a_tree_is_taken_up_again(name, tmp_path):
    """With the sequences of all tiers and all tenants. Results are equal bit for bit."""
    lm, told = small(), conversations()
    tree = tree_of(lm, POLICIES[name], host_memory=30_000, folder=tmp_path / "pages")
    tree.weight_version = ("run", 1)
    for prompt in told[:6]:
        after(lm, [prompt], prefix_cache=tree)
    after(lm, [told[0]], prefix_cache=tree.for_tenant("a"))
    texts = tree.stats().sequences
    tree.weight_version = 0
    after(lm, [told[1]], prefix_cache=tree)
    tree.weight_version = ("run", 1)
    tree.save(tmp_path / "tree", lm)
    again = kvjax.PrefixTree.load(tmp_path / "tree", lm, host_memory="1MiB")
    assert (again.weight_version, again.settings) == (("run", 1), tree.settings)
    assert again.stats().sequences == texts < tree.stats().sequences
    for tenant in (None, "a"):
        for prompt in told:
            found, hit, tokens = after(lm, [prompt], prefix_cache=again.for_tenant(tenant))
            wanted, other, others = after(lm, [prompt], prefix_cache=tree.for_tenant(tenant))
            assert hit == other and np.array_equal(found, wanted) and tokens == others
    accounted(again)
    # Sequences of other weights are not saved.
    again.weight_version = 0
    assert after(lm, [told[1]], prefix_cache=again)[1] == 0
    trained = dataclasses.replace(lm, params=jax.tree.map(lambda x: x + 1, lm.params))
    with pytest.raises(CheckpointError, match=r"sequences of the model .*, but this is"):
        kvjax.PrefixTree.load(tmp_path / "tree", trained)
    kvjax.save_cache(tmp_path / "cache", kvjax.init_cache(lm.config, max_len=8))
    with pytest.raises(CheckpointError, match="holds a cache, not a tree of prefixes"):
        kvjax.PrefixTree.load(tmp_path / "cache", lm)
    with (
        tracing_for(Target("tpu")),
        pytest.raises(CheckpointError, match="on another platform or mesh"),
    ):
        kvjax.PrefixTree.load(tmp_path / "tree", lm)
    tree.clear()
    tree.weight_version = 0
    tree.save(tmp_path / "empty", lm)
    assert kvjax.PrefixTree.load(tmp_path / "empty", lm).stats().sequences == 0


# Interrupts.


@pytest.mark.slow
def test_what_is_refused_leaves_all_texts():
    """Also a request that is too large even for an empty pool."""
    lm, rng = bare(), np.random.default_rng(6)
    tree = tree_of(lm, whole(), pages=10, host_memory=0)
    text = tuple(rng.integers(0, 9, 80).tolist())
    asked(tree, lm, [text])
    with pytest.raises(
        ValueError, match="may need 11 more pages, but the prefix tree's pool has 10 in all"
    ):
        asked(tree, lm, [tuple(rng.integers(0, 9, 170).tolist())])
    assert asked(tree, lm, [text]) == [64] and tree.stats().evicted == 0
    lease = tree.lease(lm, [list(text)], new=2)
    for call in (tree.clear, lambda: tree.save("folder", lm), lambda: asked(tree, lm, [text])):
        with pytest.raises(ValueError, match="are leased to an unfinished stream"):
            call()
    lease.finish(lease.take_cache(), None)
    tree.clear()
    assert asked(tree, lm, [text]) == [0]
    accounted(tree)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [ring(16, 24, 4, 15), POLICIES["int8"]], ids=str)
def test_nothing_is_kept_of_tokens_that_nobody_knows(policy):
    """A row whose known tokens end before its cache, which can't be rewound so far."""
    lm, rng = bare(), np.random.default_rng(10)
    tree = tree_of(lm, policy, pages=40, exact_prefix=False)
    text = tuple(rng.integers(0, 9, 90).tolist())
    lease = tree.lease(lm, [list(text)], new=2)
    cache = lease.take_cache()
    for start in range(0, 96, 16):
        numbers = np.zeros((1, 16), np.float32)
        numbers[0, : len(text[start : start + 16])] = names(text)[start : start + 16]
        length = np.array([min(90, start + 16)], np.int32)
        cache = lease.after_chunk(feed(cache, numbers, length - start), length)
    lease.finish(cache, [text[:49]])
    text, look = (*text[:49], 1, 2, 3), policy.keys == Raw()
    assert [asked(tree, lm, [text], look=look) for _ in range(2)] == [[0], [48]]
    accounted(tree)


def test_pages_that_come_back_are_theirs_or_none(monkeypatch, tmp_path):
    """After an interrupt before they are written, and after their file was deleted."""
    lm, rng = bare(), np.random.default_rng(7)
    one, two = (tuple(rng.integers(0, 9, 90).tolist()) for _ in range(2))
    for folder in (None, tmp_path):
        tree = tree_of(
            lm, whole(), pages=7, host_memory=0 if folder else 2**20, folder=folder, max_len=112
        )
        asked(tree, lm, [one])
        asked(tree, lm, [two])
        assert tree.stats().bytes["host" if folder is None else "disk"]
        if folder is None:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("kvjax.prefixes.pool._write", raising(KeyboardInterrupt))
                asked(tree, lm, [one])
            assert asked(tree, lm, [one]) == [0]
        else:
            for file in tmp_path.rglob("*.npz"):
                file.unlink()
            with pytest.warns(UserWarning, match="a cached prefix was lost: .*No such file"):
                lost = asked(tree, lm, [one])
            assert lost < [80] and asked(tree, lm, [one]) == [80]
        accounted(tree)


def raising(kind):
    def stopped(*_, **__):
        raise kind

    return stopped


def test_a_conversation_goes_on_where_there_is_room_for_two_states():
    """Checkpoints that the conversation has passed are evicted first."""
    lm, rng = bare(), np.random.default_rng(8)
    one = tree_of(lm, POLICIES["int8"]).pool_config.checkpoint_bytes
    tree = tree_of(
        lm, POLICIES["int8"], pages=40, host_memory=2 * one, checkpoint_every=100, max_len=512
    )
    text, hits = (), []
    for _ in range(6):
        text += tuple(rng.integers(0, 9, 32).tolist())
        hits += asked(tree, lm, [text], look=False)
        assert tree.stats().bytes["host"] <= 2 * one
    assert hits == [0, 32, 64, 96, 128, 160]
    # The same prompt again, which ends at the end of a chunk.
    assert asked(tree, lm, [text], look=False) == [176]


def test_a_state_is_taken_once():
    """Also for a row whose prompt is complete while another row continues."""
    lm, rng = bare(), np.random.default_rng(9)
    tree, states = tree_of(lm, POLICIES["int8"], pages=40, checkpoint_every=100), []
    lease = tree.lease(lm, [rng.integers(0, 9, n).tolist() for n in (32, 150)], new=2)
    cache = lease.take_cache()
    for held in (np.minimum(n, [32, 150]) for n in range(16, 161, 16)):
        before = len(lease._checkpoints) + len(lease._in_flight)
        cache = lease.after_chunk(cache, held.astype(np.int32))
        states += [(n, list(found.which)) for n, (found, _) in enumerate(lease._in_flight)]
        assert len(lease._checkpoints) + len(lease._in_flight) <= before + 1
    lease.finish(cache, None)
    assert len(states) == 3 and sum(map(sum, (which for _, which in states))) == 3
    accounted(tree)


def test_texts_of_weights_that_are_gone_are_forgotten():
    lm, text = bare(), tuple(range(9)) * 5
    tree, frozen = tree_of(lm, whole(), pages=40), jnp.zeros(3)
    for step in range(4):
        params = {"w": jnp.full(1, step), "frozen": frozen}
        trained = types.SimpleNamespace(config=lm.config, params=params, mesh=None)
        tree.weight_version = np.int64(step)
        asked(tree, trained, [text])
        assert asked(tree, trained, [text]) == [32]
        assert {key.weight_version for key in tree.sequences.radix.roots} == {step}
        accounted(tree)
        del trained, params


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        "lease.restore_checkpoints",
        "lease.take_checkpoints",
        "sequences.CachedSequences.keep_pages",
        "tiers.Tiers.free_pages",
    ],
)
def test_what_is_interrupted_leaves_every_page_in_its_place(where, monkeypatch):
    """Interrupts at the start of a request, during it, and at its end."""
    lm, prompt = small(), np.random.default_rng(5).integers(0, 61, 45).tolist()
    tree = tree_of(lm, POLICIES["int8"])

    def hits():
        result = kvjax.generate(lm, [prompt], max_new_tokens=4, prefix_cache=tree)
        accounted(tree)
        return result.stats.cached_tokens

    assert (hits(), hits()) == (0, 32)
    monkeypatch.setattr(f"kvjax.prefixes.{where}", raising(KeyboardInterrupt))
    prompt = [7, *prompt] if where == "lease.take_checkpoints" else prompt
    with pytest.raises(KeyboardInterrupt):
        hits()
    monkeypatch.undo()
    accounted(tree)
    assert (hits(), hits()) == (0, 32)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "small"])
def test_a_disk_that_takes_nothing_costs_texts_and_no_request(how, tmp_path, monkeypatch):
    """A full disk, and a limit that fits checkpoints but no page."""
    lm = small()
    room = (
        {}
        if how == "full"
        else {"disk_memory": tree_of(lm, POLICIES["int8"]).pool_config.checkpoint_bytes}
    )
    tree = tree_of(lm, POLICIES["int8"], host_memory=0, folder=tmp_path, **room)

    def refused(*_):
        raise OSError(28, "No space left on device")

    if how == "full":
        monkeypatch.setattr(np, "savez", refused)
    with pytest.warns(UserWarning, match="No space left") if how == "full" else nullcontext():
        for prompt in conversations():
            kvjax.generate(lm, [prompt], max_new_tokens=2, prefix_cache=tree)
            accounted(tree)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) == 0 if how == "full" else tree.stats().bytes["disk"] > 0
    assert tree.stats().evicted > 0


@pytest.mark.parametrize(
    "way", ["generate", "batches", pytest.param("beams", marks=pytest.mark.rare)]
)
def test_threads_share_a_tree(way):
    """Each request gets the same result as alone, there are hits, and every page is returned."""
    lm, rng = small(), np.random.default_rng(9)
    tree = tree_of(lm, POLICIES["int8"], host_memory="1MB")
    base = rng.integers(0, 61, 40).tolist()
    prompts = [base[: 16 * (1 + n % 3)] + rng.integers(0, 61, 3 + n).tolist() for n in range(16)]
    more = {"num_beams": 2} if way == "beams" else {}

    def tokens(prompt, **given):
        if way == "batches":
            (found,) = kvjax.generate_batches(lm, [[prompt]], max_new_tokens=4, **given)
        else:
            found = kvjax.generate(lm, [prompt], max_new_tokens=4, **more, **given)
        return found.tokens

    def asked_for(number):
        mine = prompts[number::8]
        return [(tokens(prompt, prefix_cache=tree), tree.stats().prompts)[0] for prompt in mine]

    found = together(8, asked_for)
    for number, rows in enumerate(found):
        assert rows == [tokens(prompt, **tree.settings) for prompt in prompts[number::8]]
    accounted(tree)
    assert tree.stats().prompts == len(prompts) and tree.stats().hits > 0


@pytest.mark.slow
def test_of_threads_that_stream_from_a_tree_one_has_its_pages():
    """Other threads get an error that names ``Engine``. A stream may be continued in any thread."""
    lm, tree, running = streaming("int8")
    for call in (
        lambda _: kvjax.generate(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=2),
        lambda _: next(kvjax.stream(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=2)),
        lambda _: tree.clear(),
    ):
        with pytest.raises(ValueError, match=r"a kvjax\.Engine, which serves many streams"):
            together(2, call)
    pieces = together(3, lambda _: list(running))
    assert sum(len(piece.tokens[0]) for some in pieces for piece in some) == 20 - 1
    alone = kvjax.generate(lm, [list(range(40))], max_new_tokens=20, **tree.settings)
    assert running.result.tokens == alone.tokens
    accounted(tree)
