"""Nothing recompiles for a new prompt, a new length, a new count, or a new number."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import kvjax
from kvjax.generation import programs
from kvjax.generation.generator import generate, stream
from kvjax.generation.results import Timer
from kvjax.layouts import Growing

SAMPLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 8,
    "top_p": 0.9,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.1,
    "no_repeat_ngram_size": 3,
    "typical_p": 0.95,
}

# Ten prompt lengths and token counts of one bucket set: capacity 96, widths 16 and 32 (and, where
# prompts are cut into chunks of 32, both of them in one prompt).
LENGTHS = [
    (1, 70),
    (3, 64),
    (15, 51),
    (16, 51),
    (17, 49),
    (29, 40),
    (32, 34),
    (33, 60),
    (48, 18),
    (60, 36),
]


def sizes():
    functions: Any = (programs.prefill, programs.choose_first, programs.decode)
    return [function._cache_size() for function in functions]


def prompt(length):
    return [(7 * i) % 250 for i in range(length)]


@pytest.mark.slow(but=("greedy",))
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_ten_lengths_and_counts_compile_nothing(tiny_llama, settings):
    settings = {"prefill_chunk": 32, "eos_token_ids": ()} | settings
    for length in (16, 32):
        generate(tiny_llama, [prompt(length)] * 2, max_new_tokens=66 - length, **settings)
    before = sizes()
    for n, (length, count) in enumerate(LENGTHS):
        prompts = [prompt(length), prompt(1 + length // 2)]
        result = generate(tiny_llama, prompts, max_new_tokens=count, seed=n, **settings)
        assert result.cache.max_len == 96
        assert [len(tokens) for tokens in result.tokens] == [count, count]
        assert result.stats.compilations == 0
        assert result.stats.compile_seconds == 0
    assert sizes() == before


@pytest.mark.slow
def test_new_numbers_compile_nothing(tiny_llama):
    prompts = [prompt(5)]
    asked: dict[str, Any] = SAMPLED | {"logit_bias": {5: 2.0}, "logprobs": 2}
    generate(tiny_llama, prompts, max_new_tokens=8, min_new_tokens=1, **asked)
    changed = {"temperature": 0.3, "top_k": 100, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}
    for other in (
        {"seed": 2**40},
        {"repetition_penalty": 0.9},
        {"frequency_penalty": 0.0, "presence_penalty": -1.0, "no_repeat_ngram_size": 4},
        {"min_new_tokens": 5},
        {"eos_token_ids": [1, 2, 3]},
        {"logit_bias": {token: -1.0 for token in range(7)}},
        changed,
    ):
        settings: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 2} | asked | other
        assert generate(tiny_llama, prompts, **settings).stats.compilations == 0
    fewer: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 2} | asked | {"logprobs": 1}
    assert generate(tiny_llama, prompts, **fewer).stats.compilations == 2  # first token, and loop


def test_streams_and_continuations_share_the_programs(tiny_llama):
    prompts, settings = [prompt(9)], {"max_len": 64, "eos_token_ids": ()}
    first = generate(tiny_llama, prompts, max_new_tokens=10, **settings)
    for piece in stream(tiny_llama, prompts, max_new_tokens=40, **settings):
        assert piece.stats.compilations == 0
    settings: dict[str, Any] = {"cache": first.cache, "max_new_tokens": 10, "eos_token_ids": ()}
    assert generate(tiny_llama, first.pending_tokens, **settings).stats.compilations == 0


def test_without_a_cache_too(tiny_llama):
    settings: dict[str, Any] = {"use_cache": False, "eos_token_ids": ()}
    generate(tiny_llama, [prompt(20)], max_new_tokens=10, **settings)
    for length, count in ((1, 5), (17, 30), (40, 24)):
        result = generate(tiny_llama, [prompt(length)], max_new_tokens=count, **settings)
        assert result.stats.compilations == 0


def test_compilations_and_their_seconds_are_counted():
    meter, outside = Timer(), jax.jit(lambda x: x - 1)
    inner = jax.jit(lambda x: 3 * x + 1)
    outer = jax.jit(lambda x: inner(inner(x)) + inner(x[:2]).sum())
    x = jax.numpy.arange(7.0)
    with meter.running():
        outer(x).block_until_ready()
    outside(x).block_until_ready()  # nobody measures
    assert meter.compilations == 1
    compiling = meter.compile_seconds
    assert compiling > 0
    with meter.running():
        outer(x).block_until_ready()
    assert (meter.compilations, meter.compile_seconds) == (1, compiling)


def test_nested_events_are_counted_once():
    meter = Timer()
    trace = "/jax/core/compile/jaxpr_trace_duration"
    meter.record(trace, 1e-9)
    meter.record(trace, 1e-9)
    inner = meter.compile_seconds
    meter.record(trace, 100.0)
    meter.record("/jax/some/other/event", 5.0)
    assert inner < meter.compile_seconds == pytest.approx(100.0)
    assert meter.compilations == 0
    assert meter.seconds == 0.0


@pytest.mark.slow
def test_a_ring_compiles_once_as_it_fills_and_wraps(tiny_llama):
    cache = kvjax.init_cache(tiny_llama.config, kvjax.policy("sliding_window", window=5, sinks=1))
    step = jax.jit(tiny_llama.apply, donate_argnums=2)
    for n in range(60):
        _, cache = step(tiny_llama.params, np.array([[n % 7]], np.int32), cache)
    assert cache.length.tolist() == [60] and step._cache_size() == 1
    policy = kvjax.policy("sliding_window", window=20, slack=30)
    settings: dict[str, Any] = {"cache": policy, "eos_token_ids": (), "max_new_tokens": 30}
    generate(tiny_llama, [prompt(90)], **settings)
    for length in (70, 100, 128):
        assert generate(tiny_llama, [prompt(length)], **settings).stats.compilations == 0


def test_weakly_typed_parameters_share_the_programs(tiny_llama):
    """As before an optimizer's first step, which makes them strongly typed."""
    weak = jax.tree.map(lambda x: jax.numpy.full(x.shape, 0.01), tiny_llama.params)
    assert all(x.weak_type for x in jax.tree.leaves(weak))
    settings: dict[str, Any] = {"max_new_tokens": 5, "eos_token_ids": ()}
    generate(tiny_llama, [prompt(9)], **settings)
    lm = tiny_llama.with_params(weak)
    own = kvjax.language_model(lambda *given: None, tiny_llama.config, weak)
    for each in (lm.params, own.params, lm.put(weak)):
        assert not any(x.weak_type for x in jax.tree.leaves(each))
    assert generate(lm, [prompt(9)], **settings).stats.compilations == 0


@pytest.mark.slow
def test_growing_compiles_once_a_capacity(tiny_llama):
    policy = kvjax.CachePolicy(Growing(start=16))
    cache = kvjax.init_cache(tiny_llama.config, policy)
    step = jax.jit(tiny_llama.apply, donate_argnums=2)
    for n in range(200):
        if n == cache.max_len:
            cache = kvjax.grow(cache, 2 * cache.max_len)
        _, cache = step(tiny_llama.params, np.array([[n % 7]], np.int32), cache)
    kvjax.check(cache)
    assert cache.max_len == 256 and step._cache_size() == 5  # 16, 32, 64, 128, 256


@pytest.mark.slow
def test_training_compiles_once(tiny_llama):
    """What is loaded is where an optimizer's fresh state is; what was trained goes on decoding."""
    optimizer = optax.adam(1e-3)
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)

    def loss(params):
        logits = tiny_llama.apply(params, tokens)[:, :-1]
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    @jax.jit
    def train(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state = tiny_llama.params, optimizer.init(tiny_llama.params)
    cache = kvjax.init_cache(tiny_llama.config, batch=2, max_len=16)
    step = jax.jit(tiny_llama.apply)
    before = float(loss(params))
    for _ in range(3):
        params, state = train(params, state)
        _, cache = step(params, tokens[:, :1], cache)
    assert train._cache_size() == step._cache_size() == 1
    assert loss(params) < before
