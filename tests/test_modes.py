"""JAX's strict modes and 64 bits: what users do gives the same under each as under the defaults."""

import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.compat import JAX
from kvjax.layouts import Dense, Growing, Paged
from kvjax.memory import InferenceLimits
from kvjax.models.text import read_tokenizer
from tests.checkpoints import write_tokenizer
from tests.matrix import CODECS, tiny_config, tiny_model
from tests.test_engine import Letters
from tests.test_prefixes import small

MODES: dict[str, Callable[[], Any]] = {
    # Before JAX 0.8 it is among what is experimental.
    "x64": lambda: (jax if JAX >= (0, 8) else jax.experimental).enable_x64(True),
    "rank": lambda: jax.numpy_rank_promotion("raise"),
    "dtype": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer": lambda: jax.transfer_guard("disallow"),
}
"""What a process may have set (``tests/conftest.py`` sets one for all tests: ``KVJAX_MODE``)."""

MAX_LEN = 64
PROMPTS = [[5, 3, 8, 1, 9, 9, 2], [7, 4, 4]]
CODEC = CODECS["int4"]
POLICIES: dict[str, Any] = {
    "static": "static",
    "dynamic": kvjax.CachePolicy(Growing(start=16)),
    "hybrid": kvjax.policy("hybrid", slack=15),
    "sinks": kvjax.policy("sliding_window", window=12, sinks=3, slack=15),
    "quantized": kvjax.CachePolicy(Dense(), CODEC, CODECS["int2"], block=8),
    "offloaded": kvjax.CachePolicy(Dense(), placement=kvjax.Host(), block=8),
    "offloaded bits": kvjax.CachePolicy(Dense(), CODEC, CODEC, kvjax.Host(1), block=8),
    "paged": kvjax.CachePolicy(Paged(16)),
    "paged bits": kvjax.CachePolicy(Paged(16), CODEC, CODEC, block=8),
    "float8": kvjax.CachePolicy(Dense(), CODECS["float8"], CODECS["float8"], block=8),
    "centered": kvjax.CachePolicy(Dense(), CODECS["centered"], CODECS["int8"], block=8),
    "half-quadratic": kvjax.CachePolicy(
        Dense(), CODECS["half-quadratic"], CODECS["unrotated"], block=8
    ),
}


@functools.cache
def lm() -> Any:
    return replace(small(), tokenizer=Letters())


def tokens_of(result: Any) -> Any:
    return [result.tokens, result.text]


def generated(**settings: Any) -> Any:
    settings = {"max_new_tokens": 9, "eos_token_ids": (), "prefill_chunk": 16, **settings}
    return tokens_of(kvjax.generate(lm(), PROMPTS, **settings))


DRAWN = {"temperature": 0.9, "top_p": 0.95, "seed": 3}
CONTROLS = {
    **DRAWN, "top_k": 20, "min_p": 0.01, "typical_p": 0.95, "xtc_probability": 0.5,
    "repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2,
    "no_repeat_ngram_size": 3,
    "logit_bias": {3: 1.0}, "min_new_tokens": 2, "logprobs": 3,
}  # fmt: skip

KEYS, VALUES = np.random.default_rng(0).normal(size=(2, 2, 2, 24, 8)).astype(np.float32)
QUERIES = np.random.default_rng(1).normal(size=(2, 4, 24, 8)).astype(np.float32)


def by_hand(name: str) -> Any:
    """Every operation on a cache, outside ``jit``."""
    one = tiny_config(num_hidden_layers=1, windows=(12 if name == "hybrid" else None,))
    split = [jax.device_put(x[:, :, 16:]) for x in (KEYS, VALUES)]
    policy = POLICIES[name]
    found = []

    def call(cache: Any, keys: Any, values: Any, lengths: Any = None) -> Any:
        cache = kvjax.append(cache, 0, keys, values, lengths=lengths)
        return kvjax.advance(cache, keys.shape[2])

    limit = {"max_len": MAX_LEN}
    cache = kvjax.init_cache(one, policy, batch=2, **limit)
    first = [jax.device_put(x[:, :, :15]) for x in (KEYS, VALUES)]
    cache = call(cache, *first, np.array([15, 9], np.int32))
    if name == "dynamic":
        cache = kvjax.grow(cache, 32)
    cache = kvjax.append(cache, 0, split[0], split[1])
    found.append(kvjax.attend(jax.device_put(QUERIES[:, :, :8]), cache, 0))
    cache = kvjax.advance(cache, 8)
    found.append(kvjax.rewindable(cache))
    cache = kvjax.rewind(cache, np.array([2, 1]))
    cache = kvjax.rewind(cache, 1)
    found.append(kvjax.read(cache, 0))
    other = kvjax.select(kvjax.repeat(kvjax.fork(cache), 2), [3, 0])
    both = kvjax.concatenate([cache, other])
    both = kvjax.reset(both, np.array([True, False, False, False]))
    kvjax.check(both)
    found += [both, kvjax.nbytes(both)]
    there = kvjax.Device() if "offloaded" in name else kvjax.Host()
    found.append(kvjax.convert(kvjax.fork(cache), [cache.layers[0].policy]))
    if "paged" not in name:
        found.append(kvjax.migrate(kvjax.fork(cache), there))
    return found


def jitted(name: str) -> Any:
    """A model's passes inside ``jit``: a chunk of ragged rows, and steps."""
    policy = POLICIES[name]
    model, params = lm().architecture, lm().params
    cache = kvjax.init_cache(model.config, policy, batch=2, max_len=MAX_LEN)

    @jax.jit
    def step(params: Any, tokens: Any, cache: Any, lengths: Any = None) -> Any:
        return model.apply(params, tokens, cache, lengths=lengths, last_only=True)

    @jax.jit
    def changed(cache: Any) -> Any:
        cache = kvjax.rewind(kvjax.select(cache, [1, 0]), 1)
        return kvjax.concatenate([cache, kvjax.repeat(cache, 2)])

    tokens = np.random.default_rng(0).integers(0, 61, (2, 15)).astype(np.int32)
    tokens, lengths = jax.device_put((tokens, np.array([15, 4], np.int32)))
    logits, cache = step(params, tokens, cache, lengths)
    if name == "dynamic":
        cache = kvjax.grow(cache, MAX_LEN)
    logits, cache = step(params, tokens, cache)
    for _ in range(2):
        token = jnp.argmax(logits[:, -1], axis=-1)
        logits, cache = step(params, token[:, None], cache)
    kvjax.check(cache)
    return [logits, cache, changed(cache)]


@functools.cache
def biased() -> Any:
    return tiny_model(qkv_bias=True, mlp_bias=True, qk_norm=True)


def training() -> Any:
    """The pass without a cache, and what it is differentiated by."""
    model, params = biased()
    tokens = jax.device_put(np.arange(24, dtype=np.int32).reshape(2, 12))

    def loss(params: Any) -> Any:
        return jnp.mean(jax.nn.logsumexp(model.apply(params, tokens), axis=-1))

    return [*jax.jit(jax.value_and_grad(loss))(params), model.init_params(0)]


def example() -> Any:
    """README's first one, outside ``jit`` as there."""
    cache = kvjax.init_cache(lm().config, kvjax.policy("static"), batch=2, max_len=MAX_LEN)
    tokens, lengths = lm().encode(["FGA", "IK"])
    logits, cache = lm().apply(lm().params, tokens, cache, lengths=lengths, last_only=True)
    token = jnp.argmax(logits[:, -1], axis=-1)
    logits, cache = lm().apply(lm().params, token[:, None], cache)
    kvjax.check(cache)
    return [logits, cache]


def streamed() -> Any:
    running = kvjax.stream(lm(), PROMPTS, max_new_tokens=6, eos_token_ids=(), **DRAWN)
    return [[(piece.tokens, piece.text) for piece in running], tokens_of(running.result)]


def scored() -> Any:
    found = kvjax.score(lm(), PROMPTS, [[1, 2, 3], [4]], temperature=0.7, top_k=9)
    return [found.logprobs, found.totals]


def went_on() -> Any:
    """A conversation on one cache."""
    first = kvjax.generate(lm(), PROMPTS, max_new_tokens=4, eos_token_ids=(), max_len=MAX_LEN)
    more = [[*pending_tokens, 5] for pending_tokens in first.pending_tokens]
    again = kvjax.generate(lm(), more, cache=first.cache, max_new_tokens=4, eos_token_ids=())
    return [tokens_of(first), tokens_of(again), again.cache]


def from_tree() -> Any:
    tree = kvjax.PrefixTree(lm(), pages=40, max_len=MAX_LEN, prefill_chunk=16)
    given: Any = {"max_new_tokens": 6, "eos_token_ids": (), "prefix_cache": tree}
    prompts = [[*range(20), 3], [*range(20), 5, 6]]
    return [tokens_of(kvjax.generate(lm(), prompts, **given)) for _ in range(2)]


def engine(asked: Any = None, **more: Any) -> Any:
    """Requests beside each other: drawn, by beams, with stop strings; pages are few."""
    limits = InferenceLimits(max_batch_size=3, max_seq_len=MAX_LEN)
    given: Any = {"pages": 11, "prefill_chunk": 16, "decode_steps": 4, **more}
    mine = kvjax.Engine(lm(), POLICIES["paged"], limits, **given)
    asked = asked or [{"logprobs": 2}, CONTROLS, {"num_beams": 2}, {"stop": ["BA"]}]
    handles = [
        mine.submit([*range(n, n + 20)], **{"max_new_tokens": 14, "eos_token_ids": (), **each})
        for n, each in enumerate(asked)
    ]
    while mine.step():
        pass
    return [(handle.finish_reason, handle.tokens) for handle in handles]


def rolled_out() -> Any:
    settings = {key: value for key, value in CONTROLS.items() if key != "logprobs"}
    found = kvjax.rollout(
        lm(), lm().params, PROMPTS, n=2, max_new_tokens=6, eos_token_ids=(3,), **settings
    )
    found.check()
    return [found.tokens, found.lengths, found.logprobs, found.mask]


@functools.cache
def bytewise() -> Any:
    """Of a token a byte, for chats and guides."""
    folder = Path(tempfile.mkdtemp())
    try:
        write_tokenizer(folder)
        ends = replace(small().generation, eos_token_ids=(257,))
        text = read_tokenizer(folder)
        return replace(small(vocab_size=258), tokenizer=text, generation=ends)
    finally:
        shutil.rmtree(folder)


def chatted() -> Any:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    given: Any = {"max_len": 128, "max_new_tokens": 8, "prefill_chunk": 16, "eos_token_ids": []}
    chat = kvjax.Chat(bytewise(), template=template, **given)
    return [[piece.tokens for piece in chat.send(text)] for text in ("ab", "c")]


def guided(**more: Any) -> Any:
    guide = kvjax.Guides(bytewise()).regex("[a-f]{3,5}!")
    return tokens_of(kvjax.generate(bytewise(), ["a"], guide=guide, max_new_tokens=9, **more))


def evaluated() -> Any:
    tokens = np.random.default_rng(0).integers(0, 61, 70).tolist()
    policies = {"raw": "static", "bits": POLICIES["quantized"]}
    found = kvjax.evaluate(lm(), tokens, policies, context=32, chunk=16)
    return [(each.overall.perplexity, each.overall.mean_kl) for each in found.values()]


def planned() -> Any:
    found = kvjax.plan(lm(), POLICIES["quantized"], batch=2, max_len=MAX_LEN)
    return [found.cache, found.weights]


def on_a_mesh() -> Any:
    over = kvjax.make_mesh(data=2, tensor=2, sequence=2)
    return [
        generated(mesh=over, cache=POLICIES[name], **DRAWN)
        for name in ("static", "quantized", "sinks")
    ]


def own_model() -> Any:
    """A user's function, in a mode that it is written for."""
    table = jax.device_put(np.random.default_rng(0).normal(size=(61, 2, 8)).astype(np.float32))
    config = tiny_config(num_hidden_layers=1, num_attention_heads=2, windows=(None,))

    def apply(params: Any, tokens: Any, cache: Any, lengths: Any) -> Any:
        x = jnp.take(params, tokens, axis=0).transpose(0, 2, 1, 3)
        cache = kvjax.append(cache, 0, x, x, lengths=lengths)
        y = kvjax.attend(x, cache, 0)
        logits = jnp.einsum("bhnd,vhd->bnv", y, params)
        return logits, kvjax.advance(cache, tokens.shape[1], lengths)

    own = kvjax.language_model(apply, config, table)
    return tokens_of(kvjax.generate(own, PROMPTS, max_new_tokens=5, eos_token_ids=()))


def saved() -> Any:
    cache = kvjax.init_cache(lm().config, POLICIES["quantized"], batch=2, max_len=MAX_LEN)
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    _, cache = lm().apply(lm().params, tokens, cache)
    folder = Path(tempfile.mkdtemp())
    try:
        kvjax.save_cache(folder / "cache", cache)
        return kvjax.load_cache(folder / "cache").cache
    finally:
        shutil.rmtree(folder)


@functools.cache
def draft() -> Any:
    return kvjax.DraftModel(replace(small(num_hidden_layers=1, windows=(None,)), source="draft"))


ACTIONS: dict[str, Callable[[], Any]] = {
    "example": example,
    "generate, drawn": lambda: generated(**DRAWN),
    "training": training,
    "generate, controls": lambda: generated(**CONTROLS),
    "stream": streamed,
    "score": scored,
    "went on": went_on,
    **{f"by hand, {name}": functools.partial(by_hand, name) for name in POLICIES},
    **{f"jitted, {name}": functools.partial(jitted, name) for name in POLICIES},
    **{
        f"generate, {name}": functools.partial(generated, cache=POLICIES[name], max_new_tokens=20)
        for name in POLICIES
    },
    "beams": lambda: generated(num_beams=3, n=2, length_penalty=0.8),
    "beams in pages": lambda: generated(num_beams=4, num_beam_groups=2, cache=POLICIES["paged"],
                                        diversity_penalty=0.5, repetition_penalty=1.1, n=2),
    "best of several": lambda: generated(n=2, best_of=3, **DRAWN),
    "several in pages": lambda: generated(n=3, cache=POLICIES["paged"], **DRAWN),
    "lookup": lambda: generated(draft="lookup"),
    "lookup, drawn": lambda: generated(draft="lookup", cache=POLICIES["quantized"], **CONTROLS),
    "draft model": lambda: generated(draft=draft(), **DRAWN),
    "guided": guided,
    "guided, with drafts": lambda: guided(draft="lookup"),
    "guided beams": lambda: guided(num_beams=2),
    "chat": chatted,
    "prefix tree": from_tree,
    "engine": engine,
    "engine, drafts": lambda: engine([{}, DRAWN], draft="lookup"),
    "engine, draft model": lambda: engine([{}, DRAWN], draft=draft()),
    "rollout": rolled_out,
    "own model": own_model,
    "save and load": saved,
    "evaluate": evaluated,
    "plan": planned,
    "mesh": on_a_mesh,
}  # fmt: skip
"""What users do, with what it gives."""

FIRST = {("example", "x64"), *(("generate, drawn", mode) for mode in MODES)}
"""In the README's command; the others are of the shards, and of ``KVJAX_MODES=k/n``, which asks for
every n-th from number k on."""


def told(found: Any) -> Any:
    """Leaves as NumPy's arrays, with their dtypes."""
    return [np.asarray(x) for x in jax.device_get(jax.tree.leaves(found))]


@functools.cache
def by_default(action: str) -> Any:
    return told(ACTIONS[action]())


NUMBER, PARTS = map(int, os.environ.get("KVJAX_MODES", "1/1").split("/"))
"""No number is 1 of 1: then none is asked for."""

CASES = [
    pytest.param(*case, marks=[] if at % PARTS == NUMBER or case in FIRST else pytest.mark.rare)
    for at, case in enumerate(itertools.product(ACTIONS, MODES))
]


@pytest.mark.parametrize(("action", "mode"), CASES)
def test_the_same_in_a_mode(action, mode):
    """Tokens, logits and caches, with their dtypes."""
    wanted = by_default(action)  # makes the models, which tests make as no mode allows
    with MODES[mode]():
        found = ACTIONS[action]()
    for x, right in zip(told(found), wanted, strict=True):
        assert x.dtype == right.dtype and x.shape == right.shape
        if x.dtype.kind in "fV":
            x, right = (each.astype(np.float32) for each in (x, right))
            assert np.allclose(x, right, rtol=1e-5, atol=1e-5, equal_nan=True)
        else:
            assert np.array_equal(x, right)


def test_a_guard_of_explicit_transfers_stops_them_too():
    lm()
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="isallowed host"):
        generated()
