"""Drafts in an engine, looked up or by a draft model, do not change any request's tokens."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.core.pytree import tree_bytes
from kvjax.engine import speculative
from kvjax.engine.drafts import DraftPlan, DraftState
from kvjax.generation.drafts.acceptance import cost_alone, draft_cost
from kvjax.generation.results import Timer
from kvjax.memory import InferenceLimits
from kvjax.memory.limits import available_memory
from tests.copies import assert_no_copy
from tests.test_beams import one_layer
from tests.test_engine import engine_of, settled, until
from tests.test_guided import Text
from tests.test_prefixes import MOST, POLICIES

ROWS, NEW = 3, 40
LOOKUP = kvjax.PromptLookup(min_ngram=1, adaptive=False)
SETTINGS = (
    {"logprobs": 2}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.3},
    {"repetition_penalty": 1.3}, {"logprobs": 2, "temperature": 0.2},
)  # fmt: skip


@functools.cache
def prompts():
    """Prompts of different lengths; the first and the last repeat themselves."""
    rng = np.random.default_rng(3)
    some = [rng.integers(0, 61, count).tolist() for count in (11, 23, 3)]
    return [[7, 3, 9, 1] * 5, *some, [7, 3, 9, 1] * 5 + rng.integers(0, 61, 3).tolist()]


@functools.cache
def lm():
    return one_layer()


@functools.cache
def alike(noise=0.05):
    """The model with slightly changed weights."""
    rng = np.random.default_rng(1)
    changed = lambda x: x + noise * np.std(x) * rng.standard_normal(x.shape).astype(np.float32)  # noqa: E731
    return replace(lm(), params=jax.tree.map(changed, lm().params), source="a draft")


def engine(policy="raw", draft=None, together=1, **more):
    """``together``: rows that are verified in one pass; on a CPU it would be 1."""
    found = engine_of(policy, lm=lm(), rows=ROWS, draft=draft, **more)
    found._speculative.batch_size = together
    return found


def asked(mine, draft, texts=None):
    texts = prompts() if texts is None else texts
    handles = [
        mine.submit(text, max_new_tokens=NEW, seed=n, draft=draft, **each)
        for n, (text, each) in enumerate(zip(texts, SETTINGS, strict=False))
    ]
    assert settled(mine)
    assert [handle.finish_reason for handle in handles] == ["length"] * len(texts)
    return handles


RARE = [
    pytest.param(name, *more, marks=pytest.mark.rare)
    for name in POLICIES if name != "raw"
    for more in (("model", 1), ("lookup", ROWS))
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "by", "together"),
    [
        pytest.param("int8", "lookup", 1, marks=pytest.mark.rare),
        ("raw", "model", ROWS),
        pytest.param("raw", "model", 1, marks=pytest.mark.rare),
        *RARE,
    ],
)
def test_drafts_do_not_change_tokens(policy, by, together):
    """Sampled and greedy requests together, in reused rows, with few pages, so that some are
    preempted. Nothing is compiled meanwhile."""
    draft = (
        kvjax.DraftModel(alike(), cache=POLICIES[policy], adaptive=False)
        if by == "model"
        else LOOKUP
    )
    mine = engine(policy, draft, together)
    assert mine.compile().programs == 4 + 3 * (by == "model")
    meter = Timer()
    with meter.running():
        plain, before = asked(mine, None), mine.stats()
        drafted = asked(mine, "engine")
    assert meter.compilations == 0
    assert [handle.tokens for handle in drafted] == [handle.tokens for handle in plain]
    for one, other in zip(drafted, plain, strict=True):
        if one.logprobs is not None:
            both = zip(one.logprobs, other.logprobs, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in both) < 2e-4
    assert before.drafted_tokens == before.accepted_tokens == 0
    after = mine.stats()
    assert 20 < after.accepted_tokens < after.drafted_tokens


@pytest.mark.slow
def test_the_draft_model_agrees_after_chunks_and_pauses():
    """The draft is the model itself, so all its tokens must be accepted: after prompts of several
    chunks, and after a pause in which it missed tokens."""
    mine = engine(draft=kvjax.DraftModel(lm(), adaptive=False), pages=40)
    text = np.random.default_rng(4).integers(0, 61, 75).tolist()
    given = {"max_new_tokens": 50, "temperature": 0.8, "eos_token_ids": ()}
    (plain,) = mine.run([text], draft=None, **given)
    handle = mine.submit(text, **given)
    until(mine, lambda: len(handle.tokens) > 3)
    handle.drafts._acceptance = replace(handle.drafts._acceptance, cooldown=25)
    assert settled(mine) and handle.tokens == plain.tokens
    stats = mine.stats()
    assert stats.accepted_tokens == stats.drafted_tokens > 10


@pytest.mark.slow
def test_the_draft_model_reads_every_token():
    """It is often wrong, and each time proposes its own continuation of the sequence."""
    mine, proposed = engine(draft=kvjax.DraftModel(alike(), adaptive=False), pages=40), []
    its, propose = mine._speculative._draft_runner, mine._speculative._draft_runner.propose

    def noting(drafted, some, past):
        found = propose(drafted, some, past)
        for at, seq, more in some:
            text = [*seq.prompt, *seq.handle.generated]
            proposed.append((text, found.tokens[at, 1 : 1 + more].tolist()))
        return found

    its.propose = noting
    mine.run([[7, 3, 9, 1] * 3], max_new_tokens=NEW, eos_token_ids=())
    texts, drafts = zip(*proposed, strict=True)
    alone = kvjax.generate(alike(), texts, max_new_tokens=7, eos_token_ids=())
    assert len(drafts) > 5 and mine.stats().accepted_tokens < mine.stats().drafted_tokens - 10
    assert list(drafts) == [
        tokens[: len(draft)] for tokens, draft in zip(alone.tokens, drafts, strict=True)
    ]


@pytest.mark.slow
def test_a_draft_model_with_nan_logits():
    """It proposes nothing, and requests continue."""
    none = replace(lm(), params=jax.tree.map(lambda x: x * np.nan, lm().params), source="none")
    mine = engine(draft=kvjax.DraftModel(none, adaptive=False), together=ROWS)
    plain, drafted = asked(mine, None), asked(mine, "engine")
    assert [x.tokens for x in drafted] == [x.tokens for x in plain]
    assert mine.stats().drafted_tokens > NEW


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, pytest.param(ROWS, marks=pytest.mark.rare)])
def test_with_guides(together):
    """Token masks follow the proposed tokens, which are fetched for that."""
    mine = engine(draft=kvjax.DraftModel(lm(), 3, adaptive=False), together=together)
    texts = [[3, 9, 1, 5, 8], [2, 4, 6, 8]]
    handles = [
        mine.submit(prompts()[n], guide=Text(text), eos_token_ids=(8,), max_new_tokens=12)
        for n, text in enumerate(texts)
    ]
    free = mine.submit(prompts()[2], max_new_tokens=12)
    assert settled(mine) and [handle.tokens for handle in handles] == texts
    assert free.tokens == mine.run(prompts()[2:3], draft=None, max_new_tokens=12)[0].tokens
    assert mine.stats().drafted_tokens > mine.stats().accepted_tokens > 0


@pytest.mark.slow
def test_it_works_on_a_mesh():
    mesh = kvjax.make_mesh(tensor=2, devices=jax.devices()[:2])
    draft = kvjax.DraftModel(alike(), adaptive=False)
    mine = engine_of(lm=lm().on(mesh), rows=ROWS, draft=draft)
    drafted = asked(mine, "engine")
    assert [x.tokens for x in drafted] == [x.tokens for x in asked(mine, None)]
    assert mine.stats().accepted_tokens > 20


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, ROWS])
def test_programs_update_pools_in_place(together, monkeypatch):
    """Both models' programs; the pools are larger than what rows use."""
    fewer = speculative.draft_pool_config
    monkeypatch.setattr(
        speculative,
        "draft_pool_config",
        lambda lm, draft, count, *more: fewer(lm, draft, 99, *more),
    )
    mine = engine(draft=kvjax.DraftModel(alike()), together=together, pages=400)
    its, sent = mine._speculative._draft_runner._runner, {}

    def noting(rows):
        dispatch = rows.dispatch

        def noted(program, *args, **static):
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x,
                (rows._state_with_pages(), *args),
            )
            sent[rows, program.__name__] = program, shapes, static
            return dispatch(program, *args, **static)

        rows.dispatch = noted

    noting(mine._runner)
    noting(its)
    mine.compile()
    assert (its, "propose") in sent and (mine._runner, "verify") in sent
    for (rows, name), (program, shapes, static) in sent.items():
        if name in ("propose", "verify") or rows is its:
            sizes = [sum(x.nbytes for x in jax.tree.leaves(b)) for b in rows.prefixes.pool.bodies]
            assert_no_copy(program.lower(*shapes, **static).compile(), sum(sizes), min(sizes))


def test_drafts_pause_when_they_save_no_time():
    price, alone = draft_cost("cpu", 1, 7, 0.0), lambda price: price
    text = [1, 2, 3] * 3
    drafts = DraftState(DraftPlan(kvjax.PromptLookup(min_ngram=1), price), text)
    assert drafts.relative_cost(7, alone, True) == pytest.approx(
        (1 + price.verify) / (1 + 3.8503), rel=1e-4
    )
    assert drafts.relative_cost(7, lambda price: replace(price, verify=9.0), True) > 2
    assert drafts.relative_cost(0, alone, True) == math.inf
    assert drafts.next(7, alone) == (7, [1, 2, 3, 1, 2, 3, 1])
    assert drafts.next(0, alone) == (0, [])
    assert cost_alone(price, "cpu", 1, 1) == price
    busy = lambda price: cost_alone(price, "cpu", 8, 8)  # noqa: E731
    assert drafts.idle(7, busy) and drafts.next(7, busy) == (0, [])
    for new in ([5, 1], [2], [3]):
        assert not drafts.idle(7, alone)
        drafts.push(new)
        drafts.record(7, 0)
    assert drafts.idle(7, alone) and drafts.next(7, alone) == (0, [])
    assert drafts.relative_cost(7, alone, True) == math.inf
    drafts.push([3, 1, 60])
    drafts._acceptance = replace(drafts._acceptance, cooldown=0)
    assert (
        drafts.relative_cost(7, alone, True) == math.inf
        and drafts.relative_cost(7, alone, False) < 1
    )
    drafts.push([3, 1] * 8)
    assert not drafts.idle(7, alone) and drafts.next(3, alone) == (3, [3, 1, 3])
    dear = DraftState(DraftPlan(kvjax.DraftModel(lm()), draft_cost("cpu", 1, 7, 1.0)), text)
    assert dear.by_model and dear.next(7, alone) == (0, [])
    free = DraftState(DraftPlan(kvjax.DraftModel(lm(), 3), None), text)
    free.record(3, 0)
    assert free.next(7, alone) == (3, [])


@pytest.mark.slow
def test_all_rows_draft_or_none():
    """One row less does not make a pass cheaper. A row whose draft is being verified waits for it,
    also when other requests come, since its length is not known before."""
    mine = engine(draft=kvjax.PromptLookup(min_ngram=1), pages=40)
    drafted = lambda: mine.stats().drafted_tokens  # noqa: E731
    first = mine.submit([7, 3, 9, 1] * 5, max_new_tokens=60, eos_token_ids=())
    until(mine, lambda: drafted() > 0)
    (seq,) = mine._scheduler.running
    busy = lambda price: cost_alone(price, "cpu", 8, 8)  # noqa: E731
    assert seq.verifying and first.drafts.idle(7, busy) and seq.rounds(8, 7, busy) == 0
    other = mine.submit([5, 6], max_new_tokens=16, eos_token_ids=(), draft=None)
    until(mine, lambda: len(other.tokens) > 0)
    before = drafted()
    until(mine, lambda: len(other.tokens) > 10)
    assert drafted() == before and not first.done and other.drafts is None
    assert settled(mine) and drafted() > before
    load, price = mine._speculative.adjust_cost, draft_cost("cpu", 1, 7, 0.0)
    row = lambda takes: SimpleNamespace(entries=[0], relative_cost=lambda most, load: takes)  # noqa: E731
    assert load([])(price) == price
    assert load([row(1.4), row(0.5)])(price).verify == 0.0
    for mine._speculative.batch_size in 1, ROWS:
        for each in (1.1,), (1.6, 0.5), (0.1, math.inf):
            assert load([*map(row, each)])(price).verify == math.inf
    assert load([row(0.5)])(price) == replace(price, verify=0.0)


@pytest.mark.slow
def test_the_draft_of_a_request():
    draft = kvjax.DraftModel(alike(), adaptive=False)
    mine, other = engine(draft=draft), engine(draft="lookup")
    by = lambda engine, **more: engine.submit([1, 2], max_new_tokens=4, **more).request.draft_plan  # noqa: E731
    assert by(mine).draft is draft and by(other).draft == kvjax.PromptLookup()
    assert by(mine, draft=draft).draft is draft and by(mine, draft=LOOKUP).draft is LOOKUP
    assert by(mine, draft=None) is by(engine()) is None
    once = SimpleNamespace(allowed=None, accept=None)
    assert by(mine, num_beams=2) is by(mine, guide=once) is None
    for more, words in (
        ({"draft": lm()}, "a model that the engine was not created with"),
        ({"draft": "all"}, "draft is 'all'"),
        ({"draft": "lookup", "num_beams": 2}, "draft"),
        ({"draft": np.zeros(2)}, "draft is array"),
        ({"draft": draft, "guide": once}, r"draft needs a guide with copy\(\)"),
        ({"guide": [Text([1])]}, r"a guide needs a method allowed\(\)"),
        ({"guide": Text([1]), "min_new_tokens": 2}, "min_new_tokens is 2, but a guide may allow"),
    ):
        with pytest.raises(ValueError, match=words):
            mine.submit([1, 2], max_new_tokens=4, **more)
    assert settled(mine) and settled(other)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (one_layer().on(kvjax.make_mesh(tensor=2, devices=jax.devices()[:2])), "another mesh"),
        (jax.device_put(one_layer().params, jax.devices()[1]), "on other devices"),
        (kvjax.DraftModel(one_layer(), cache=kvjax.policy("paged", pages=8)), "policy sets pages"),
        (kvjax.DraftModel(one_layer(), cache="auto"), r"policy\('auto'\)"),
        ("all", "draft is 'all'"),
    ],
)
def test_invalid_drafts(draft, words):
    if isinstance(draft, dict):
        draft = replace(lm(), params=draft)
    with pytest.raises(ValueError, match=words):
        engine(draft=draft)
    with pytest.raises(ValueError, match="prefill_chunk must be an integer"):
        engine(draft=alike(), prefill_chunk="x")


def test_pools_leave_room_for_the_draft_model():
    """Its pages and its own parameters take memory from the model's pages."""
    own, shared = (engine(draft=draft)._speculative._draft_runner for draft in (alike(), lm()))
    cache = tree_bytes(shared._runner.prefixes.pool.bodies)
    assert shared.nbytes == cache and own.nbytes == cache + tree_bytes(lm().params)
    page = sum(kind.page_bytes for kind in engine().pool_config.groups)
    found = []
    for draft, pages in ((None, 10), (lm(), 10 + cache // page)):
        free = 2**30 - available_memory(lm(), batch=ROWS, capacity=MOST, memory=2**30)
        limits = InferenceLimits(
            max_batch_size=ROWS, max_seq_len=MOST, cache_memory_ratio=1.0,
            device_memory=free + pages * page + 12,  # a few numbers of each row
        )  # fmt: skip
        mine = kvjax.Engine(lm(), POLICIES["raw"], limits, prefill_chunk=32, draft=draft)
        found += mine.stats().pages
    assert found == [10, 10]
