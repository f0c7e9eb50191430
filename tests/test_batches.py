"""A stream of batches: the same results, got ready ahead."""

import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest

import kvjax
from kvjax.generation.request import prompt_chunks
from kvjax.memory.limits import InferenceLimits
from kvjax.operations.migration import move_layers
from tests import laws

BATCHES = [["abc", "the cache"], [[65, 66]], "a text", ["x" * 40] * 2]
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


def sessions(lm, texts=("one", "another", "a third")):
    """Batches that go on from caches on the host, and the tokens that they should bring."""
    began = [kvjax.generate(lm, [text], **AT) for text in texts]
    again = [result.pending_tokens for result in began]
    wanted = [
        kvjax.generate(lm, pending_tokens, cache=kvjax.fork(result.cache), **AT).tokens
        for result, pending_tokens in zip(began, again, strict=True)
    ]
    parked = [kvjax.migrate(result.cache, kvjax.Host()) for result in began]
    return [
        kvjax.generation.Batch(pending_tokens, cache)
        for pending_tokens, cache in zip(again, parked, strict=True)
    ], wanted


def used_up(batch):
    return [layer.keys.is_deleted() for layer in batch.cache.layers]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [1, 2])
def test_parked_sessions_are_taken_up(tiny_llama, ahead, monkeypatch):
    """The next one's first layers are moved by the second thread while the present one runs, the
    others at its turn, and what is done is parked again."""
    batches, wanted = sessions(tiny_llama)
    moves, begun = [], threading.Event()

    def watched(cache, placement, places, **more):
        moves.append((threading.current_thread().name, list(places)))
        begun.set()
        return move_layers(cache, placement, places, **more)

    monkeypatch.setattr(kvjax.generation.batches, "move_layers", watched)
    results = kvjax.generate_batches(
        tiny_llama, batches, placement=kvjax.Device(), offload=kvjax.Host(), **AT,
        limits=InferenceLimits(prefetch_steps=ahead),
    )  # fmt: skip
    found = [next(results)]
    assert begun.wait(60)  # it may get its turn only now
    assert moves == [("kvjax-batches_0", list(range(ahead)))]
    assert list(map(used_up, batches)) == [[True] * 2, [False] * 2, [False] * 2]
    found += results
    assert len(moves) == 2 and used_up(batches[2]) == [True] * 2
    assert [result.tokens for result in found] == wanted
    for result in found:
        assert result.stats.cache_bytes == kvjax.nbytes(result.cache)
        assert set(kvjax.nbytes(result.cache)) == {"host", "device"}
        assert {layer.keys.sharding.memory_kind for layer in result.cache.layers} == {laws.ON_HOST}


def test_a_session_whose_turn_never_comes_is_whole(tiny_llama):
    batches, wanted = sessions(tiny_llama)
    results = kvjax.generate_batches(tiny_llama, batches, placement=kvjax.Device(), **AT)
    assert next(results).tokens == wanted[0]
    results.close()
    rest = kvjax.generate_batches(tiny_llama, batches[1:], placement=kvjax.Device(), **AT)
    assert [result.tokens for result in rest] == wanted[1:]


def test_what_is_got_ready_is_used(tiny_llama, monkeypatch):
    """By the second thread, on the caller's default device."""
    ready = []

    def watched(*args):
        ready.append((threading.current_thread().name, jax.config.jax_default_device))
        return prompt_chunks(*args)

    monkeypatch.setattr(kvjax.generation.batches, "prompt_chunks", watched)
    monkeypatch.delattr(kvjax.generation.streaming, "prompt_chunks")
    device = jax.local_devices()[0]
    with jax.default_device(device):
        assert len(list(kvjax.generate_batches(tiny_llama, BATCHES, **AT))) == len(BATCHES)
    assert ready == [("kvjax-batches_0", device)] * len(BATCHES)


def test_a_chain_of_results(tiny_llama):
    """With nothing taken ahead, a batch can go on from the result before it."""
    held = []

    def source():
        yield "abc"
        for _ in range(2):
            yield kvjax.generation.Batch(held[-1].pending_tokens, held[-1].cache)

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
    with pytest.raises(ValueError, match="prefetch_steps must be an integer >= 0"):
        InferenceLimits(prefetch_steps=-1)


def test_an_error_of_the_stream_waits_its_turn(tiny_llama):
    def source():
        yield "abc"
        yield "de"
        raise RuntimeError("no more of them")

    results = kvjax.generate_batches(
        tiny_llama, source(), limits=InferenceLimits(prefetch_steps=3), **AT
    )
    assert [next(results).stats.new_tokens for _ in range(2)] == [6, 6]
    with pytest.raises(RuntimeError, match="no more of them"):
        next(results)


def test_one_cache_for_two_batches_is_refused(tiny_llama):
    batches, _ = sessions(tiny_llama, ("one",))
    for placement in (None, kvjax.Device()):
        again = kvjax.generation.Batch(batches[0].prompts, kvjax.fork(batches[0].cache))
        results = kvjax.generate_batches(tiny_llama, [again, again], placement=placement, **AT)
        next(results)
        with pytest.raises(ValueError, match="was used up by an earlier call"):
            next(results)
    cache = kvjax.fork(batches[0].cache)
    results = kvjax.generate_batches(tiny_llama, [batches[0].prompts] * 2, cache=cache, **AT)
    next(results)
    with pytest.raises(ValueError, match="was used up by an earlier call"):
        next(results)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"placement": "host"}, "'host' is not a placement"),
        ({"offload": kvjax.Host}, "is not a placement: give Device"),
        ({"limits": {}}, "limits must be InferenceLimits, got {}"),
    ],
)
def test_wrong_arguments_are_told_at_once(tiny_llama, wrong, message):
    with pytest.raises(ValueError, match=message):
        kvjax.generate_batches(tiny_llama, ["abc"], **wrong)
    with pytest.raises(ValueError, match="prompts are a string, a list of strings"):
        next(kvjax.generate_batches(tiny_llama, [None]))
    with pytest.raises(ValueError, match="must be a KVCache, got 'static'"):
        kvjax.generation.Batch("a", "static")


def test_stopping_early_leaves_nothing_running(tiny_llama):
    results = kvjax.generate_batches(tiny_llama, itertools.repeat("abc"), **AT)
    next(results)
    assert any("kvjax-batches" in thread.name for thread in threading.enumerate())
    results.close()
    assert next(results, None) is None
    assert not any("kvjax-batches" in thread.name for thread in threading.enumerate())


def test_a_batch_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        kvjax.generation.Batch("abc").prompts = "d"
