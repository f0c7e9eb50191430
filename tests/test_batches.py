"""A stream of batches: the same results, got ready ahead."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.limits import InferenceLimits

BATCHES = [["abc", "the cache"], [[65, 66]], "a text", ["x" * 40] * 3]
AT = {"max_new_tokens": 6, "eos_token_ids": (), "prefill_chunk": 16}


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_results_are_those_of_generate(tiny_llama, ahead):
    taken = []

    def source():
        for batch in BATCHES:
            taken.append(batch)
            yield batch

    limits = InferenceLimits(prefetch_steps=ahead)
    results = kvjax.generate_batches(tiny_llama, source(), limits=limits, **AT)
    assert taken == []
    for number, (found, batch) in enumerate(zip(results, BATCHES, strict=True)):
        assert len(taken) == min(number + 1 + ahead, len(BATCHES))
        wanted = kvjax.generate(tiny_llama, batch, **AT)
        assert found.tokens == wanted.tokens and found.text == wanted.text
        for a, b in zip(*map(jax.tree.leaves, (found.cache, wanted.cache)), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))


def test_it_compiles_what_generate_compiles(tiny_llama):
    """Tokens that were put on the device ahead take no program of their own."""
    batches = [["abcdefg", "the cache"]] * 3
    first, *rest = kvjax.generate_batches(tiny_llama, batches, **AT)
    assert [result.stats.compilations for result in rest] == [0, 0]
    assert kvjax.generate(tiny_llama, batches[0], **AT).stats.compilations == 0
    assert rest[1].tokens == first.tokens


def test_parked_sessions_are_taken_up(tiny_llama):
    """The next one's first layer is moved while the present one runs, the others at its turn, and
    what is done is parked again."""
    began = [kvjax.generate(tiny_llama, [text], **AT) for text in ("one", "another", "a third")]
    again = [result.unfed for result in began]
    wanted = [
        kvjax.generate(tiny_llama, unfed, cache=kvjax.fork(result.cache), **AT).tokens
        for result, unfed in zip(began, again, strict=True)
    ]
    parked = [kvjax.migrate(result.cache, kvjax.Host()) for result in began]
    sessions = [kvjax.Batch(unfed, cache) for unfed, cache in zip(again, parked, strict=True)]
    results = kvjax.generate_batches(
        tiny_llama, sessions, placement=kvjax.Device(), park=kvjax.Host(), **AT
    )
    found = [next(results)]
    gone = [
        [layer.keys.is_deleted() for layer in cache.layers] for cache in parked
    ]  # of the first all, of the second its first layer, of the third none
    assert gone == [[True, True], [True, False], [False, False]]
    found += results
    assert [result.tokens for result in found] == wanted
    for result in found:
        assert set(kvjax.nbytes(result.cache)) == {"host", "device"}
        assert {layer.keys.sharding.memory_kind for layer in result.cache.layers} == {"pinned_host"}


def test_a_chain_of_results(tiny_llama):
    """With nothing taken ahead, a batch can go on from the result before it."""
    held = []

    def source():
        yield "abc"
        for _ in range(2):
            yield kvjax.Batch(held[-1].unfed, held[-1].cache)

    limits = InferenceLimits(prefetch_steps=0)
    for result in kvjax.generate_batches(tiny_llama, source(), limits=limits, max_len=64, **AT):
        held.append(result)
    whole = kvjax.generate(tiny_llama, "abc", **{**AT, "max_new_tokens": 18}, max_len=64)
    found = list(itertools.chain.from_iterable(result.tokens[0] for result in held))
    assert found == whole.tokens[0]


def test_a_wrong_batch_is_told_at_its_turn(tiny_llama):
    results = kvjax.generate_batches(tiny_llama, ["abc", [], "abc"], **AT)
    assert next(results).stats.new_tokens == 6
    with pytest.raises(ValueError, match="no prompts: the list is empty"):
        next(results)
    with pytest.raises(ValueError, match="give an iterable of batches"):
        kvjax.generate_batches(tiny_llama, "abc", **AT)
    with pytest.raises(TypeError, match="temprature"):
        kvjax.generate_batches(tiny_llama, ["abc"], temprature=1.0)
    limits = InferenceLimits(max_batch_size=1)
    with pytest.raises(ValueError, match="2 prompts, but max_batch_size is 1"):
        list(kvjax.generate_batches(tiny_llama, [["a", "b"]], limits=limits))
    with pytest.raises(ValueError, match="prefetch_steps must be a whole number, at least 0"):
        InferenceLimits(prefetch_steps=-1)


def test_stopping_early_leaves_nothing_running(tiny_llama):
    results = kvjax.generate_batches(tiny_llama, itertools.repeat("abc"), **AT)
    next(results)
    results.close()
    assert next(results, None) is None


def test_a_batch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        kvjax.Batch("abc").prompts = "d"
