"""The engine: each request gets bitwise the same results as alone; no page leaks."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import random
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.pytree import tree_bytes
from kvjax.core.validation import NonFiniteError
from kvjax.engine import model_runner
from kvjax.engine.service import StoppedError
from kvjax.generation.results import Timer
from kvjax.memory import InferenceLimits
from kvjax.memory.limits import available_memory
from kvjax.sampling.params import PARAMS
from tests.alive import alive
from tests.copies import assert_no_copy
from tests.test_prefixes import POLICIES, small
from tests.threads import together

CHUNK, ROWS, MOST, PAGES, WIDE = 32, 4, 192, 14, 4
FEWER = {"4 and 2 bits": 13, "sinks": 10, "sinks of 8 bits": 9}  # too few for all requests


def in_shards(name):
    return pytest.param(name, marks=pytest.mark.rare)


OTHERS = map(
    in_shards, ("raw", "4 and 2 bits", "sinks", "sinks of 8 bits", "hybrid of slots", "host")
)


class Letters:
    """A tokenizer with one letter per token."""

    def encode(self, text, *, add_special_tokens=True):
        return [ord(letter) - ord("A") for letter in text]

    def stream(self, after=()):
        return self

    def push(self, token):
        return chr(ord("A") + token)

    def finish(self):
        return ""


@functools.cache
def lettered():
    return dataclasses.replace(small(), tokenizer=Letters())


def engine_of(policy="raw", *, lm=None, rows=ROWS, ahead=1, **more):
    given = {"pages": FEWER.get(policy, PAGES), "prefill_chunk": CHUNK, "decode_steps": WIDE}
    limits = InferenceLimits(max_batch_size=rows, max_seq_len=MOST, prefetch_steps=ahead)
    return kvjax.Engine(lettered() if lm is None else lm, POLICIES[policy], limits, **given | more)


def settings_of(number, rng):
    return {
        "max_new_tokens": int(rng.integers(1, 60)), "seed": number, "logprobs": 3,
        "temperature": 0.8 * (number % 2), "top_p": 0.9 if number % 4 == 1 else None,
        "top_k": 20 if number % 6 == 3 else None, "min_p": 0.01 if number % 8 == 5 else None,
        "repetition_penalty": 1.2 if number % 5 == 0 else None,
        "frequency_penalty": 0.4 if number % 4 == 2 else None,
        "presence_penalty": 0.5 if number % 6 == 1 else None,
        "no_repeat_ngram_size": 1 + number % 3 if number % 9 == 4 else None,
        "typical_p": 0.8 if number % 10 == 7 else None,
        "xtc_probability": 0.5 if number % 10 == 1 else None,
        "logit_bias": {3: 2.0, 9: -5.0} if number % 7 == 0 else None,
        "min_new_tokens": 1, "eos_token_ids": (7,),
        "stop": [chr(65 + number % 61), chr(65 + number % 59) * 2] if number % 3 == 1 else None,
    }  # fmt: skip


@functools.cache
def asked(count=64):
    """Requests of every kind; a third of them share a prefix."""
    rng = np.random.default_rng(0)
    system, found = rng.integers(0, 61, 40).tolist(), []
    for number in range(count):
        own = rng.integers(0, 61, int(rng.integers(1, 90))).tolist()
        prompt = (system + own)[:120] if number % 3 == 0 else own
        found.append((prompt, settings_of(number, rng)))
    return found


@functools.cache
def alone(policy):
    """The results of each request in an engine of its own."""
    engine = engine_of(policy)
    return [told(engine.run([prompt], **settings)[0]) for prompt, settings in asked()]


def told(handle):
    return handle.tokens, handle.text, handle.logprobs, handle.finish_reason


def settled(engine):
    """Run to the end; whether all pages, rows and bytes are free, counted in three ways."""
    while engine.step():
        pass
    stats, texts = engine.stats(), engine._prefixes
    kept = [set() for _ in stats.pages]
    for node in texts.radix:
        assert node.lock_count == 0
        for kind, pages in enumerate(node.pages):
            kept[kind] |= {page.page for page in pages if page is not None and page.page >= 0}
    refs = [np.flatnonzero(counts.refs) for counts in texts.pool.allocators]
    assert [sorted(numbers) for numbers in kept] == [found.tolist() for found in refs]
    assert [len(each) for each in kept] == list(stats.cached_pages)
    assert all((counts.refs <= 1).all() for counts in texts.pool.allocators)
    assert all((table == -1).all() for table in engine._runner.page_tables.tables)
    assert stats.used_pages == (0,) * len(stats.used_pages) and stats.swapped_bytes == 0
    return stats.running == stats.waiting == 0 and stats.swapped_bytes == 0


def until(engine, condition):
    """Step until the condition holds."""
    for _ in range(1000):
        if condition():
            return
        engine.step()
    raise AssertionError("it does not come to that")


def in_any_order(engine, requests, seed, cancels=0.05):
    """Submit requests in any order, cancel some; their handles by number."""
    rng, handles = random.Random(seed), {}
    left = rng.sample(range(len(requests)), len(requests))
    while left or engine.busy:
        for _ in range(rng.randint(0, 4)):
            if left:
                prompt, settings = requests[number := left.pop()]
                handles[number] = engine.submit(prompt, **settings)
        going = [handle for handle in handles.values() if not handle.done]
        if going and rng.random() < cancels:
            engine.cancel(rng.choice(going))
        engine.step()
    return handles


@pytest.mark.parametrize("policy", [in_shards("int8"), "hybrid", *OTHERS])
def test_results_match_a_request_alone_bitwise(policy):
    """64 requests in any order: some are cancelled, some swapped to the host, some computed again,
    and many share prefixes. Nothing is compiled meanwhile."""
    wanted, meter = alone(policy), Timer()
    states = 2 * engine_of(policy).pool_config.checkpoint_bytes
    # In this order pages run out often enough.
    seed = {"int8": 7, "sinks of 8 bits": 10}.get(policy, len(policy))
    for host in ("1GiB", states):
        engine = engine_of(policy, host_memory=host)
        engine.compile()
        with meter.running():
            handles = in_any_order(engine, asked(), seed=seed)
        assert meter.compilations == 0
        stats = engine.stats()
        assert stats.preemptions > 0 and (stats.swapped < stats.preemptions or host != states)
        assert stats.cached_tokens > 100 and settled(engine)
        for number, handle in handles.items():
            tokens, text, scores, reason = wanted[number]
            if handle.finish_reason != "cancelled":
                assert told(handle) == wanted[number], (number, handle, reason)
            assert handle.tokens == tokens[: len(handle.tokens)] and text.startswith(handle.text)
            assert handle.logprobs == scores[: len(handle.tokens)]
        ended = [handle.finish_reason for handle in handles.values()]
        assert {"length", "eos", "stop", "cancelled"} <= set(ended)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raw", in_shards("int8"), in_shards("hybrid")])
def test_results_do_not_depend_on_other_rows_lengths(policy):
    """Bitwise, next to rows of several blocks, in any batch and at any place in it."""
    rng, limits = (
        np.random.default_rng(0),
        InferenceLimits(max_batch_size=6, max_seq_len=800),
    )
    prompts = [rng.integers(0, 61, count).tolist() for count in (700, 150, 40, 300, 90, 20)]
    settings: Any = {"max_new_tokens": 16, "logprobs": 3, "eos_token_ids": ()}

    def run(prompts):
        engine = kvjax.Engine(lettered(), POLICIES[policy], limits, prefill_chunk=64)
        found = [[told(x) for x in engine.run(some, **settings)] for some in prompts]
        return list(itertools.chain(*found))

    assert run([prompts]) == run([[each] for each in prompts])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raw", in_shards("int8"), in_shards("hybrid")])
def test_logprobs_match_the_uncached_pass(policy):
    """Raw pages match to float precision, 8-bit pages to theirs; greedy tokens match
    ``generate``."""
    lm, near = lettered(), 0.2 if policy == "int8" else 1e-5
    found = zip(asked(), alone(policy), strict=True)
    for (prompt, _settings), (tokens, _, scores, _) in itertools.islice(found, 0, 64, 8):
        text = np.zeros((1, MOST), np.int32)
        text[0, : len(prompt) + len(tokens)] = prompt + tokens
        logits = uncached(lm.params, text)
        known = np.asarray(jax.nn.log_softmax(logits[0, len(prompt) - 1 :]))
        for token, score, line in zip(tokens, scores, known, strict=False):
            assert abs(score.logprob - line[token]) < near
            for other, logprob in score.top_logprobs:
                assert abs(logprob - line[other]) < near


@pytest.mark.slow
def test_logprobs_of_the_sampling_distribution_match_generate():
    """After temperature, filters, penalties and biases."""
    texts = 0
    for number in (1, 3, 5):
        (prompt, settings), (tokens, _, scores, _) = asked()[number], alone("raw")[number]
        found = kvjax.generate(lettered(), [prompt], **settings)
        assert found.tokens == [tokens] and found.logprobs is not None and scores is not None
        drawn = [score.sampling_logprob for score in found.logprobs[0]]
        np.testing.assert_allclose([score.sampling_logprob for score in scores], drawn, atol=1e-4)
        texts += any(abs(score.sampling_logprob - score.logprob) > 0.01 for score in scores)
    assert texts == 3


@jax.jit
def uncached(params, tokens):
    return lettered().apply(params, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.rare), 0.9])
def test_tokens_match_generate(temperature):
    prompts = [prompt for prompt, _ in asked()[:8]]
    settings = {"max_new_tokens": 20, "eos_token_ids": (), "temperature": temperature, "seed": 5}
    wanted = kvjax.generate(lettered(), prompts, prefill_chunk=CHUNK, **settings)
    for given in ({}, {"batch_invariant": False}, {"prefix_cache": False}):
        handles = engine_of(**given).run(prompts, **settings)
        assert [handle.tokens for handle in handles] == wanted.tokens
        assert [handle.text for handle in handles] == wanted.text


@pytest.mark.slow
def test_shared_prefixes_are_computed_once():
    engine, prompt = engine_of(), list(range(60)) * 2
    handles = engine.run([[*prompt, n] for n in range(6)], max_new_tokens=2)
    # While the first one is being prefilled.
    assert [handle.cached_tokens for handle in handles] == [0, *[96] * 5]
    stats = engine.stats()
    assert stats.prompt_tokens == 6 * 121 and stats.prefill_tokens == 121 + 5 * 25
    other = engine.submit(prompt, tenant="another")
    mine = engine.submit(prompt, tenant="another")
    while engine.step():
        pass
    assert (other.cached_tokens, mine.cached_tokens) == (0, 96) and settled(engine)
    engine.update_params(jax.tree.map(jnp.copy, lettered().params))
    assert engine.run([prompt])[0].cached_tokens == 0


@pytest.mark.slow
def test_parameters_change_between_steps():
    """Running and swapped requests continue with the new parameters. New requests get the results
    of the new parameters alone, though they share prefixes with older requests."""
    lm = lettered()
    params = jax.tree.map(lambda x: x * jnp.asarray(1.01, x.dtype), lm.params)
    others = engine_of(lm=dataclasses.replace(lm, params=params))
    wanted = others.run([list(range(40))], max_new_tokens=9)[0]
    engine = engine_of()
    before = [engine.submit(list(range(40)) * k, max_new_tokens=60) for k in (1, 2, 3, 3)]
    until(engine, lambda: len(before[0].tokens) >= 4)
    old = list(before[0].tokens)
    engine.update_params(params)
    after = engine.submit(list(range(40)), max_new_tokens=9, logprobs=0)
    while engine.step():
        pass
    assert after.tokens == wanted.tokens and settled(engine)
    # Rows that started with the old parameters have cached nothing after the update.
    assert {name.weight_version for name in engine._prefixes.radix.roots} == {1}
    assert before[0].tokens[:4] == old[:4] and all(len(each.tokens) == 60 for each in before)
    with pytest.raises(ValueError, match="not those of the engine's model"):
        engine.update_params({"other": jnp.zeros(3)})
    meter, device = Timer(), jax.devices()[0]
    with meter.running():
        engine.update_params(jax.device_put(params, device))
        engine.run([[1, 2]])
        engine.update_params(jax.tree.map(np.asarray, params))
        engine.run([[1, 2]])
    assert meter.compilations == 0
    with pytest.raises(ValueError, match=r"engine's model: parameters must be a pytree of arrays"):
        engine.update_params({"other": 3})
    with pytest.raises(ValueError, match="on other devices"):
        engine.update_params(jax.device_put(params, jax.devices()[1]))
    for tenant in range(9):
        engine.run([[1, 2]], tenant=tenant)
    assert len(engine._prefixes.radix.roots) < 3


@pytest.mark.slow
def test_stats_report_the_allocated_bytes(monkeypatch):
    """Bytes of all arrays, also while the engine is being created."""
    lm, held, made, before = lettered(), [], model_runner.allocate, 0

    def new_bytes():
        return sum(x.nbytes for x in alive()) - before

    def allocate(*given, **named):
        held.append(new_bytes())
        return made(*given, **named)

    def pointers(params):
        return {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)}

    monkeypatch.setattr(model_runner, "allocate", allocate)
    second = dataclasses.replace(lm, params=jax.tree.map(jnp.copy, lm.params))
    weights = tree_bytes(lm.params)
    for draft in (None, kvjax.DraftModel(second)):
        before = 0
        before = new_bytes()
        engine = engine_of("sinks", lm=lm, pages=None, draft=draft)
        stats, new = engine.stats(), new_bytes()
        its = 0 if draft is None else weights
        # Committed parameters are other arrays in the same memory.
        assert new - weights - its == stats.pool_bytes + stats.row_bytes + stats.draft_bytes - its
        assert pointers(engine._runner.params) == pointers(lm.params)
        assert stats.weight_bytes == weights and stats.draft_bytes >= its
        # A full device cannot hold a second pool, even for a moment.
        assert held.pop(0) < stats.pool_bytes
        planned = kvjax.plan(
            lm.architecture,
            list(engine.pool_config.policies),
            batch=ROWS,
            max_len=MOST,
            compiled=False,
        )
        tails = planned.cache["device"] - stats.pool_bytes
        assert 0 <= tails < stats.row_bytes
        held.clear()
        del engine


@pytest.mark.slow
def test_reported_tokens_stay_when_new_parameters_compute_them_again():
    """A request continues after the tokens that were reported with the old parameters."""
    lm, engine = lettered(), engine_of(host_memory=0, prefix_cache=False, pages=8)
    params = jax.tree.map(lambda x: x * jnp.asarray(1.05, x.dtype), lm.params)
    late = engine.submit([1, 2, 3], max_new_tokens=50, logprobs=0, temperature=1.0)
    until(engine, lambda: len(late.tokens) >= 10)
    told = list(late.tokens)
    engine.submit([4] * 60, max_new_tokens=60, priority=-1)
    until(engine, lambda: late.preemptions)
    engine.update_params(params)
    while engine.step():
        pass
    assert late.tokens[: len(told)] == told and len(late.tokens) == 50
    text = np.zeros((1, MOST), np.int32)
    text[0, :53] = [1, 2, 3, *late.tokens]
    known = np.asarray(jax.nn.log_softmax(uncached(params, text)[0, 2:52]))
    wanted = known[np.arange(50), late.tokens]
    found = [score.logprob for score in late.logprobs or ()]
    # Of the earlier tokens, the new parameters would have sampled others.
    np.testing.assert_allclose(found[44:], wanted[44:], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raw", "int8", "hybrid"])
def test_a_request_that_needs_all_pages(policy):
    """It just fits, with cached prefixes in the pool and next to other requests."""
    kinds = engine_of(policy).pool_config.groups
    engine = engine_of(policy, pages=max(kind.max_pages(180) for kind in kinds), checkpoint_every=1)
    first = [*range(60), *range(60)]
    second = [*first[:100], 1, 2, 3]
    for prompts in ([first], [second], [first, second, first[:50], [7, 8]]):
        handles = engine.run(prompts, max_new_tokens=60)
        assert all(len(handle.tokens) == 60 for handle in handles)
    assert settled(engine)


@pytest.mark.slow
def test_requests_of_one_page_run_in_all_rows():
    """The pool has one page for each, and no request needs a second."""
    limits = InferenceLimits(max_batch_size=3, max_seq_len=16)
    engine = kvjax.Engine(lettered(), POLICIES["raw"], limits, prefill_chunk=16)
    handles = [engine.submit([n, n], max_new_tokens=14) for n in range(3)]
    assert engine.stats().pages == (3,)
    until(engine, lambda: engine.stats().running == 3)
    assert not any(handle.done for handle in handles) and settled(engine)


def test_a_finished_request_frees_its_pages_at_once():
    engine = engine_of(prefix_cache=False)
    handle = engine.submit([1] * 40, max_new_tokens=100)
    until(engine, lambda: len(handle.tokens) >= 3)
    assert engine.stats().used_pages[0] > 2 and engine.stats().running == 1
    engine.cancel(handle)
    engine.step()
    stats = engine.stats()
    assert (stats.used_pages, stats.running, stats.free_pages) == ((0,), 0, stats.pages)
    assert settled(engine)


def test_priorities_deadlines_and_cancel():
    """Lower priorities run first, then earlier requests. Deadlines and cancel end waiting and
    running requests."""
    engine = engine_of(rows=1)
    first = engine.submit([1, 2, 3], max_new_tokens=30)
    engine.step()
    late, urgent, never, dropped = (
        engine.submit([4, 5], max_new_tokens=3, **more)
        for more in ({}, {"priority": -1}, {"deadline": 1e-9}, {})
    )
    engine.cancel(dropped)
    ended = []
    for each in (first, late, urgent, never, dropped):
        each._callback = ended.append
    while engine.step():
        pass
    last = [x for n, x in enumerate(ended) if x.done and x not in ended[n + 1 :]]
    assert last in ([never, dropped, first, urgent, late], [dropped, never, first, urgent, late])
    assert (never.finish_reason, dropped.finish_reason, never.tokens) == (
        "deadline",
        "cancelled",
        [],
    )
    running = engine.submit([1, 2], max_new_tokens=100, deadline=60.0)
    engine.step()
    engine.step()
    object.__setattr__(running.request, "deadline", 1e-9)
    engine.step()
    assert running.finish_reason == "deadline" and settled(engine)


@pytest.mark.slow
def test_non_finite_logits_end_one_request():
    lm = small(tie_word_embeddings=False)
    params = jax.tree.map(lambda x: x, lm.params)
    table = params["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[60].set(jnp.nan)
    engine = engine_of(lm=dataclasses.replace(lm, params=params))
    handles = [engine.submit(prompt, max_new_tokens=5) for prompt in ([1, 2], [60], [3] * 50)]
    with pytest.raises(NonFiniteError, match="after 0 new tokens"):
        list(engine.stream(handles[1]))
    while engine.step():
        pass
    assert [handle.finish_reason for handle in handles] == ["length", "error", "length"]


@pytest.mark.slow
def test_reused_pages_of_non_finite_rows_do_not_reach_windows():
    """Requests with windows get the pages that such rows had."""
    lm = small(tie_word_embeddings=False)
    params = jax.tree.map(lambda x: x, lm.params)
    table = params["model"]["embed_tokens"]
    table["weight"] = table["weight"].at[60].set(jnp.nan)
    given = {"host_memory": 0, "decode_steps": 8}
    engine = engine_of("hybrid", lm=dataclasses.replace(lm, params=params), **given)
    rng, good, bad = np.random.default_rng(0), [], []
    for number in range(24):
        prompt = rng.integers(0, 60, int(rng.integers(1, 90))).tolist()
        broken = (prompt * 70)[:70]
        broken[35] = 60
        bad.append(engine.submit(broken, max_new_tokens=20))
        more = {"seed": number, "logit_bias": {60: -1e6}}
        good.append(engine.submit(prompt, max_new_tokens=20 + number, **more))
    while engine.step():
        pass
    assert {handle.finish_reason for handle in good} == {"length"}
    assert {handle.finish_reason for handle in bad} == {"error"}


class Choice:
    """A guide that allows one sequence of tokens, then the end."""

    def __init__(self, tokens):
        self.left = list(tokens)

    def allowed(self):
        words = np.zeros(2, np.uint32)
        words[self.left[0] // 32] |= np.uint32(1 << self.left[0] % 32)
        return words

    def accept(self, token):
        assert token == self.left.pop(0)


@pytest.mark.parametrize("host", ["1GiB", 0])
def test_guides_constrain_tokens(host):
    """Next to other requests, and with preemption."""
    engine, texts = engine_of(host_memory=host), [[5, 60, 31, 32, 7] * 3, [0, 33, 7] * 3]
    more = {"eos_token_ids": (), "temperature": 1.0}
    guided = [
        engine.submit([1, 2, 3], guide=Choice(text), max_new_tokens=len(text), **more)
        for text in texts
    ]
    settings = {"max_new_tokens": 100, "priority": -1}
    others = [engine.submit(list(range(50)), seed=n, **settings) for n in range(4)]
    while engine.step():
        pass
    assert [handle.tokens for handle in guided] == texts
    assert all(len(each.tokens) == 100 for each in others) and settled(engine)


def test_a_failing_program_ends_all_requests(monkeypatch):
    engine, ended = engine_of(), []
    for n in range(6):
        engine.submit([1, 2, n], max_new_tokens=30, callback=ended.append)
    engine.step()
    monkeypatch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert {handle.finish_reason for handle in ended} == {"error"} and len(set(ended)) == 6
    assert all(isinstance(handle.error, ZeroDivisionError) for handle in ended)
    assert settled(engine)


def test_an_interrupted_step_loses_nothing(monkeypatch):
    """The next step collects what it had dispatched."""
    engine = engine_of()
    handles = [engine.submit(prompt, **settings) for prompt, settings in asked()[:6]]
    send, left = engine._runner.decode, iter([False, True, False, True])

    def decode(*given):
        if next(left, False):
            raise KeyboardInterrupt
        return send(*given)

    monkeypatch.setattr(engine._runner, "decode", decode)
    while engine.busy:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert [told(handle) for handle in handles] == alone("raw")[:6] and settled(engine)


@pytest.mark.slow
def test_swapped_state_leaves_the_device():
    engine = engine_of(pages=8, prefix_cache=False)
    late = engine.submit([1] * 40, max_new_tokens=60)
    until(engine, lambda: len(late.tokens) >= 4)
    engine.submit([2] * 60, max_new_tokens=60, priority=-1)
    until(engine, lambda: late.swapped is not None)
    engine.step()
    engine.step()
    kept = [late.swapped.layers, late.swapped.progress, [read() for read in late.swapped.pages]]
    assert all(isinstance(x, np.ndarray | np.generic) for x in jax.tree.leaves(kept))
    assert late.swapped.on_host and engine.stats().swapped_bytes == late.swapped.nbytes
    while engine.step():
        pass
    assert len(late.tokens) == 60 and settled(engine)


def test_a_failing_guide_or_callback_ends_its_request_only():
    engine = engine_of()

    def callback(handle):
        raise RuntimeError("a user's")

    fine = engine.submit([1, 2, 3], max_new_tokens=9)
    wrong = [
        engine.submit([1, 2], guide=Choice([])), engine.submit([1, 2], callback=callback),
    ]  # fmt: skip
    while engine.step():
        pass
    assert (
        fine.finish_reason == "length" and [each.finish_reason for each in wrong] == ["error"] * 2
    )
    assert isinstance(wrong[0].error, IndexError) and settled(engine)
    with pytest.raises(RuntimeError, match="a user's"):
        list(engine.stream(wrong[1]))


def test_streams_of_several_requests():
    engine = engine_of()
    handles = [engine.submit(prompt, **settings) for prompt, settings in asked()[:5]]
    for handle, (tokens, text, scores, _) in zip(handles, alone("raw"), strict=False):
        pieces = list(engine.stream(handle))
        assert "".join(piece.text for piece in pieces) == text
        assert [token for piece in pieces for token in piece.tokens] == tokens
        assert [score for piece in pieces for score in piece.scores] == scores


def test_threads_step_one_engine():
    """Some run, some stream, and each thread gets all its output."""
    engine = engine_of()
    requests, wanted = asked()[:8], alone("raw")

    def asks(number):
        prompt, settings = requests[number]
        if number % 2:
            (handle,) = engine.run([prompt], **settings)
            return told(handle)
        handle = engine.submit(prompt, **settings)
        pieces = list(engine.stream(handle))
        assert "".join(piece.text for piece in pieces) == handle.text
        assert [token for piece in pieces for token in piece.tokens] == handle.tokens
        return told(handle)

    assert together(8, asks) == wanted[:8] and settled(engine)


@pytest.mark.parametrize("ahead", [0, 3])
def test_prefetched_steps(ahead):
    engine = engine_of(ahead=ahead)
    handles = in_any_order(engine, asked()[:16], seed=ahead, cancels=0)
    assert [told(handles[n]) for n in range(16)] == alone("raw")[:16] and settled(engine)


def test_a_service_serves_its_readers():
    """Many readers in another thread than the engine's. A reader that stops frees its row."""
    engine, requests = engine_of(), asked()[:12]

    async def read(service, number):
        prompt, settings = requests[number]
        handle = service.submit(prompt, **settings)
        pieces = [piece async for piece in service.pieces(handle)]
        assert "".join(piece.text for piece in pieces) == handle.text
        return told(handle)

    async def leave(service):
        handle = service.submit([1, 2, 3], max_new_tokens=150)
        async with contextlib.aclosing(service.pieces(handle)) as pieces:
            async for _ in pieces:
                break
        return handle

    async def all_of_them():
        async with kvjax.engine.Service(engine) as service:
            gone, *found = await asyncio.gather(
                leave(service), *(read(service, number) for number in range(12))
            )
            while engine.stats().running:
                await asyncio.sleep(0.001)
            left = service.submit([1, 2], max_new_tokens=150)
            reading = asyncio.create_task(service.finished(left))
            await asyncio.sleep(0)
        with pytest.raises(StoppedError):
            await reading
        with pytest.raises(StoppedError):
            service.submit([1])
        return gone, found

    gone, found = asyncio.run(all_of_them())
    assert gone.finish_reason == "cancelled" and found == alone("raw")[:12]
    engine.cancel(next(iter([seq.handle for seq in engine._scheduler.running]), gone))
    assert settled(engine)


def test_the_newest_request_is_preempted():
    """Among the requests after the one that needs pages."""
    engine = engine_of(prefix_cache=False)
    handles = [engine.submit(list(range(48)), max_new_tokens=100) for _ in range(3)]
    until(engine, lambda: any(handle.preemptions for handle in handles))
    assert [handle.preemptions for handle in handles] == [0, 0, 1]
    while engine.step():
        pass
    assert handles[0].preemptions == 0 and settled(engine)


def test_requests_come_from_any_thread():
    engine, handles = engine_of(), {}

    def ask(first):
        for number in range(first, 16, 4):
            prompt, settings = asked()[number]
            handles[number] = engine.submit(prompt, **settings)
            engine.stats()

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.busy:
        engine.step()
    assert [told(handles[n]) for n in range(16)] == alone("raw")[:16] and settled(engine)
    assert len({handle.number for handle in handles.values()}) == 16


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raw", "int8"])
def test_it_works_on_a_mesh(policy):
    mesh = kvjax.make_mesh(tensor=2, devices=jax.devices()[:2])
    engine = engine_of(policy, rows=6, lm=lettered().on(mesh))
    engine.compile()
    requests = asked()[:12]
    handles = in_any_order(engine, requests, seed=1, cancels=0)
    other = engine_of(policy, rows=6, lm=lettered().on(mesh))
    wanted = [told(other.run([prompt], **settings)[0]) for prompt, settings in requests]
    assert [told(handles[n]) for n in range(12)] == wanted and settled(engine)


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("policy", ["raw", "int8"])
def test_programs_update_pools_in_place(policy, exact):
    """The pool is much larger than what all rows use."""
    engine, sent = engine_of(policy, pages=400, batch_invariant=exact), {}
    dispatch, runner = engine._runner.dispatch, engine._runner

    def noted(program, *args, **static):
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x,
            (runner._state_with_pages(), *args),
        )
        sent[program] = shapes, static
        return dispatch(program, *args, **static)

    runner.dispatch = noted
    engine.compile()
    bodies = [jax.tree.leaves(body) for body in engine._prefixes.pool.bodies]
    sizes = [sum(x.nbytes for x in body) for body in bodies]
    assert {program.__name__ for program in sent} == {
        "branch", "decode", "prefill", "restore_row", "set_history", "verify",
    }  # fmt: skip
    for program, (shapes, static) in sent.items():
        assert_no_copy(program.lower(*shapes, **static).compile(), sum(sizes), min(sizes))


@pytest.mark.slow
def test_two_thousand_requests():
    """Nothing is compiled, and no device array, page or host memory leaks."""
    engine, meter = engine_of(host_memory=100_000), Timer()
    engine.compile()
    requests = [asked()[number % 64] for number in range(2000)]
    in_any_order(engine, requests[:200], seed=0)
    before = sum(x.nbytes for x in alive())
    with meter.running():
        handles = in_any_order(engine, requests, seed=1)
    assert meter.compilations == 0 and settled(engine)
    wanted = alone("raw")
    for number, handle in handles.items():
        assert handle.finish_reason == "cancelled" or told(handle) == wanted[number % 64]
    assert sum(x.nbytes for x in alive()) <= before + 10_000
    assert engine.stats().preemptions > 100


BAD = {
    "max_new_tokens": ({"max_new_tokens": 0}, "max_new_tokens must be an integer"),
    "too long": ({"max_new_tokens": MOST}, "max_seq_len is 192"),
    "priority": ({"priority": 0.5}, "priority must be an integer, got 0.5"),
    "deadline": ({"deadline": -1}, "deadline must be .* above 0, got -1"),
    "logprobs": ({"logprobs": 21}, "at most 20"),
    "logprobs of the prompt": (
        {"prompt_logprobs": 21},
        "prompt_logprobs must be at most 20, got 21",
    ),
    "bias": ({"logit_bias": {99: 1.0}}, "logit_bias: token id 99"),
    "ends": ({"eos_token_ids": range(17)}, "eos_token_ids has 17 tokens"),
    "tenant": ({"tenant": 1.5}, "tenant is 1.5"),
    "seed": ({"seed": -1}, "seed must be"),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_requests(name):
    settings, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        engine_of().submit([1, 2, 3], **settings)


def test_a_finished_row_has_neutral_parameters():
    """Otherwise it would switch filters on for other rows."""
    engine = engine_of()
    request = engine.check(
        [1, 2, 3], max_new_tokens=9, **{name: param.example for name, param in PARAMS.items()},
        logit_bias={1: 2.0}, seed=5, eos_token_ids=[3], logprobs=2,
    )  # fmt: skip
    state, row = engine._runner.sampling_state, np.array([1])
    neutral = state.copy(row)
    state.set(1, request)
    used = state.copy(row)
    for field in dataclasses.fields(neutral.sampling):
        before, after = (getattr(x.sampling, field.name) for x in (neutral, used))
        assert not np.array_equal(before, after), field.name
    assert (used.limit, used.logprobs, used.search) == (9, 3, False)
    state.clear(1)
    jax.tree.map(np.testing.assert_array_equal, state.copy(row), neutral)


@pytest.mark.slow
def test_the_last_new_token_needs_no_position():
    """Nor a page: the pool has pages for ``MOST`` tokens only."""
    lm = lettered()
    engine = engine_of(rows=1, pages=MOST // 16)
    for held, new in ((MOST - 12, 13), (MOST, 1)):
        prompt = [(7 * n) % 60 for n in range(held)]
        (handle,) = engine.run([prompt], max_new_tokens=new, eos_token_ids=())
        assert len(handle.tokens) == new and handle.finish_reason == "length"
        logits = lm.apply(lm.params, np.array([(prompt + handle.tokens)[:MOST]], np.int32))
        assert handle.tokens == np.argmax(logits[0, held - 1 :], axis=-1).tolist()
        with pytest.raises(ValueError, match=f"need {MOST + 1} positions, but .* is {MOST}"):
            engine.submit(prompt, max_new_tokens=new + 1)
    assert settled(engine)


@pytest.mark.slow
def test_prompt_logprobs():
    """They match the uncached pass, and bitwise the request alone, though its prefix is cached and
    it may be preempted."""
    lm, engine = lettered(), engine_of()
    some = [(prompt, {**settings, "max_new_tokens": 40}) for prompt, settings in asked()[:9]]
    told_too = [{"prompt_logprobs": 2}, {}, {"prompt_logprobs": 0}]
    each = [(prompt, settings | told_too[n % 3]) for n, (prompt, settings) in enumerate(some)]
    handles = [engine.submit(prompt, **settings) for prompt, settings in [*some, *each]]
    assert settled(engine) and engine.stats().preemptions and engine.stats().cached_tokens
    text = np.zeros((9, 120), np.int32)
    for row, (prompt, _) in zip(text, some, strict=True):
        row[: len(prompt)] = prompt
    every = jax.nn.log_softmax(lm.apply(lm.params, text)[:, :-1])
    wanted = np.take_along_axis(np.asarray(every), text[:, 1:, None], axis=2)[..., 0]
    for n, ((prompt, settings), before, handle) in enumerate(
        zip(each, handles[:9], handles[9:], strict=True)
    ):
        found = handle.prompt_logprobs
        if "prompt_logprobs" not in settings:
            assert found is None and told(handle) == told(before)
            continue
        assert handle.tokens == before.tokens and handle.cached_tokens == 0
        assert found[0] is None and len(found) == len(prompt)
        assert all(len(x.top_logprobs) == settings["prompt_logprobs"] for x in found[1:])
        own = [x.logprob for x in found[1:]]
        np.testing.assert_allclose(own, wanted[n, : len(prompt) - 1], atol=1e-4)
        alone = engine_of().run([prompt], **settings)[0]
        assert (told(alone), alone.prompt_logprobs) == (told(handle), found)


@pytest.mark.slow
def test_prompt_logprobs_stay_while_they_are_computed_again():
    """The request is preempted and computed again."""
    few: dict[str, Any] = {"pages": 5, "decode_steps": 2, "host_memory": 0, "prefill_chunk": 16}
    limits = InferenceLimits(max_batch_size=2, max_seq_len=64)
    engine = kvjax.Engine(lettered(), kvjax.policy("paged", page_size=16), limits, **few)
    engine.submit([5] * 8, max_new_tokens=56, eos_token_ids=())
    asked = {"max_new_tokens": 20, "eos_token_ids": (), "prompt_logprobs": 0}
    handle = engine.submit([7] * 40, **asked)
    told = []
    while engine.step():
        told.append(handle.prompt_logprobs)
    assert engine.stats().preemptions and len(told[-1]) == 40
    for before, after in itertools.pairwise(told):
        assert after[: len(before)] == before


def test_pools_use_the_available_memory(monkeypatch):
    """The device cannot hold all rows at full length."""

    def default():
        return kvjax.Engine(lettered(), POLICIES["raw"], limits)

    limits = InferenceLimits(max_batch_size=ROWS, max_seq_len=MOST)
    whole = default()
    needed = sum(x.nbytes for x in jax.tree.leaves(whole._prefixes.pool.bodies))
    other = 10**12 - available_memory(lettered(), batch=ROWS, capacity=MOST, memory=10**12)
    found = []
    for part in (2, 0.5):
        memory = other + int(part * needed / 0.9)
        monkeypatch.setattr("kvjax.memory.limits.device_memory", lambda memory=memory: memory)
        found += default().stats().pages
    all_rows = ROWS * MOST // 16
    assert [*whole.stats().pages, found[0]] == [all_rows] * 2
    assert 0.4 * all_rows < found[1] <= 0.5 * all_rows


def test_invalid_engines():
    lm = lettered()
    for given, words in {
        "max_num_batched_tokens": (
            {"max_num_batched_tokens": 3},
            "max_num_batched_tokens must be an integer >= 36",
        ),
        "batch_invariant": ({"batch_invariant": 1}, "batch_invariant must be True or False, got 1"),
        "rounds": ({"decode_steps": 0}, "decode_steps"),
    }.values():
        with pytest.raises(ValueError, match=words):
            engine_of(**given)
    with pytest.raises(ValueError, match="no layer is paged"):
        kvjax.Engine(lm, "static", InferenceLimits(max_seq_len=64))
    with pytest.raises(ValueError, match=r"limits=InferenceLimits\(max_seq_len"):
        kvjax.Engine(lm)
    with pytest.raises(ValueError, match=r"need 12 pages of pool 0, which has 3"):
        engine_of(pages=3).submit([1] * 100, max_new_tokens=92)
    with pytest.raises(ValueError, match="token id 61 is out of range"):
        engine_of().submit([61])
