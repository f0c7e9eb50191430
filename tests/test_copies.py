"""The copy law: no step moves a cache, or half a layer of one, in vain."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import kvjax
from kvjax.codecs import Raw
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Dense, Ring
from kvjax.models.architecture import Architecture
from tests.copies import assert_no_copy, copies
from tests.matrix import (
    CODECS,
    COPY_PAIRS,
    FORMS,
    FULL,
    LAYOUTS,
    RAW,
    SHARD,
    cells,
    copy_cells,
    tiny_config,
)

CONFIG = tiny_config(num_hidden_layers=2, windows=(None, None), head_dim=16)
MODEL = Architecture(CONFIG)


def one_step(token, cache):
    """A step of a cache without a model: queries, keys and values come from a number a row."""
    held = cache.layers[0]
    channels = jnp.arange(1, 1 + held.head_dim, dtype=jnp.float32)
    for layer in range(len(cache.layers)):  # each layer depends on the one before
        x = jnp.sin(channels * token[:, None, None, None])
        shapes = ((len(token), heads, 1, held.head_dim) for heads in (held.kv_heads, 8))
        keys, queries = (jnp.broadcast_to(x, shape) for shape in shapes)
        cache = kvjax.append(cache, layer, keys, keys + 1)
        mixed = kvjax.attend(queries, cache, layer)
        token = token + mixed.sum((1, 2, 3))
    return token, kvjax.advance(cache, 1)


def loop_of_steps(token, cache):
    def go_on(carry):
        return jnp.all(carry[1].length < carry[2])

    def step(carry):
        return *one_step(*carry[:2]), carry[2]

    return lax.while_loop(go_on, step, (token, cache, cache.length[0] + 5))[:2]


def scan_of_steps(token, cache):
    def step(carry, _):
        carry = one_step(*carry)
        return carry, carry[0]

    (_, cache), tokens = lax.scan(step, (token, cache), length=5)
    return tokens, cache


def chunk(token, cache):
    held = cache.layers[0]
    channels = jnp.arange(1, 1 + 16 * held.head_dim, dtype=jnp.float32).reshape(1, 1, 16, -1)
    x, mixed = jnp.sin(channels * token[:, None, None, None]), []
    lengths = jnp.clip(token.astype(jnp.int32), 0, 16)
    shapes = ((len(token), heads, 16, held.head_dim) for heads in (held.kv_heads, 8))
    keys, queries = (jnp.broadcast_to(x, shape) for shape in shapes)
    for layer in range(len(cache.layers)):
        cache = kvjax.append(cache, layer, keys, keys + 1, lengths=lengths)
        mixed.append(kvjax.attend(queries, cache, layer, lengths=lengths))
    return mixed, kvjax.advance(cache, 16, lengths)


PROGRAMS = {"step": one_step, "while_loop": loop_of_steps, "scan": scan_of_steps, "chunk": chunk}


def large(layout, size):
    """A layout of the matrix for ``size`` tokens."""
    made, (window, _) = LAYOUTS[layout]
    if layout.startswith("paged"):
        inner = made.inner
        if window is not None:
            inner = dataclasses.replace(inner, window=size // 2, slack=128)
        return dataclasses.replace(made, page_size=256, inner=inner)
    if window is not None:
        return dataclasses.replace(made, window=size // 2, slack=128)
    return dataclasses.replace(made, start=size) if layout == "growing" else made


def compiled(form, policy, batch, max_len, layers=1):
    config = tiny_config(num_hidden_layers=layers, windows=(None,) * layers)
    cache = jax.eval_shape(lambda: kvjax.init_cache(config, policy, batch=batch, max_len=max_len))
    token = jax.ShapeDtypeStruct((batch,), jnp.float32)
    program = jax.jit(PROGRAMS[form], donate_argnums=1).lower(token, cache).compile()
    return program, cache


@pytest.mark.parametrize("cell", cells(copy_cells(), COPY_PAIRS))
def test_cache_is_aliased_and_never_copied(cell):
    check(cell)


def check(cell):
    """The law of a cell: no copy, and no temporaries that grow with the cache."""
    codecs = [RAW.get(name) or CODECS[name] for name in cell.codecs]
    temporary = []
    # The scores of a block of 1,024 tokens are more than half of 65,536 tokens of 1 and 2 bits.
    for size in (262144, 1048576):
        policy = kvjax.CachePolicy(large(cell.layout, size), codecs[0], codecs[-1])
        program, cache = compiled(cell.form, policy, 2, size, layers=2 if FULL or SHARD else 1)
        smallest = min(tree_bytes(layer) for layer in cache.layers)
        assert_no_copy(program, kvjax.nbytes(cache)["device"], smallest)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.slow(but=("scan",))
@pytest.mark.parametrize("form", FORMS)
def test_a_model_copies_nothing(form):
    """Layers with different layouts, and weights."""

    def step(token, cache, params):
        logits, cache = MODEL.apply(params, token[:, None].astype(jnp.int32), cache)
        return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.float32), cache

    def call(token, cache, params):
        if form == "chunk":
            tokens = jnp.tile(token[:, None], (1, 16)).astype(jnp.int32)
            return MODEL.apply(params, tokens, cache, last_only=True)
        if form == "while_loop":
            going = lambda carry: jnp.all(carry[1].length < 5)  # noqa: E731
            return lax.while_loop(going, lambda c: step(*c, params), (token, cache))
        if form == "scan":
            return lax.scan(lambda c, _: (step(*c, params), None), (token, cache), length=5)[0]
        return step(token, cache, params)

    temporary = []
    for size in (8192, 32768):
        policy = [
            kvjax.CachePolicy(Ring(size // 2, sinks=1)), kvjax.CachePolicy(Dense()),
        ]  # fmt: skip
        cache = jax.eval_shape(
            lambda size=size, policy=policy: kvjax.init_cache(CONFIG, policy, batch=2, max_len=size)
        )
        token = jax.ShapeDtypeStruct((2,), jnp.float32)
        lowered = jax.jit(call, donate_argnums=1).lower(token, cache, MODEL.abstract_params())
        program, smallest = lowered.compile(), min(tree_bytes(layer) for layer in cache.layers)
        assert_no_copy(program, kvjax.nbytes(cache)["device"], smallest)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("batch", [1, 8])
def test_batches_do_not_copy(batch):
    program, cache = compiled("step", kvjax.policy("static"), batch, 4096, layers=2)
    size = kvjax.nbytes(cache)["device"]
    assert_no_copy(program, size, size // 2)


SINGLE = [
    ("while_loop", "dense"), ("scan", "dense"), ("scan", "dense-int8-int4"),
    ("while_loop", "ring-int8-int4"), ("while_loop", "dense-int8-int4"), ("scan", "ring-int8-int4"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "name"),
    [*SINGLE[:4], *(pytest.param(*each, marks=pytest.mark.rare) for each in SINGLE[4:])],
)
def test_a_single_row_is_not_copied_in_a_loop(form, name):
    # Its axis of length 1 lets a compiler order a body in another way in the loop than outside.
    layout, *names = name.split("-")
    codecs = [CODECS[each] for each in names] or [Raw()]
    policy = kvjax.CachePolicy(large(layout, 131072), codecs[0], codecs[-1])
    program, cache = compiled(form, policy, 1, 131072)
    smallest = min(tree_bytes(layer) for layer in cache.layers)
    assert_no_copy(program, kvjax.nbytes(cache)["device"], smallest)
    assert program.memory_analysis().temp_size_in_bytes < smallest // 2


@pytest.mark.slow(but=("3-float16", "9-bfloat16", "3-bfloat16"))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads", [3, 9])  # one row of queries, and three
def test_a_layer_in_one_piece_is_not_copied(dtype, heads):
    """A model in the dtype of its cache, mostly filled: a CPU multiplies whole layers, or not."""
    config = tiny_config(
        num_hidden_layers=1, windows=(None,), num_key_value_heads=3, head_dim=64, dtype=dtype
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, queries, one):
        cache = kvjax.append(cache, 0, one, one)
        return kvjax.attend(queries, cache, 0), kvjax.advance(cache, 1)

    queries, one = (jax.ShapeDtypeStruct((1, n, 1, 64), jnp.dtype(dtype)) for n in (heads, 3))
    temporary = []
    for max_len in (8192, 32768):
        cache = jax.eval_shape(lambda n=max_len: kvjax.init_cache(config, batch=1, max_len=n))
        program = step.lower(cache, queries, one).compile()
        size = kvjax.nbytes(cache)["device"]
        assert_no_copy(program, size, size)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert max(temporary) < 1.1 * min(temporary)


def test_the_search_finds_a_copy():
    """The attention that reads the whole array at once makes copies: the search must see them."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(queries, cache):
        cache = kvjax.append(cache, 0, queries, queries)
        mixed = kvjax.attend(queries, cache, 0, path="reference")
        return mixed + 1, jax.tree.map(lambda x: x * 2, cache)

    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=4)
    cache = jax.eval_shape(lambda: kvjax.init_cache(config, batch=1, max_len=4096))
    queries = jax.ShapeDtypeStruct((1, 4, 1, 8), jnp.float32)
    assert copies(step.lower(queries, cache).compile(), kvjax.nbytes(cache)["device"] // 2)


def test_temporaries_of_a_prompt_do_not_grow_with_it():
    def prefill(params, tokens, cache):
        return MODEL.apply(params, tokens, cache, last_only=True)

    params, temporary = MODEL.abstract_params(), []
    cache = jax.eval_shape(lambda: kvjax.init_cache(CONFIG, batch=1, max_len=65536))
    for prompt in (2048, 8192):
        tokens = jax.ShapeDtypeStruct((1, prompt), jnp.int32)
        program = jax.jit(prefill, donate_argnums=2).lower(params, tokens, cache).compile()
        tokens_bytes = 3 * 4 * prompt  # the tokens themselves, padded, and in parts
        temporary.append(program.memory_analysis().temp_size_in_bytes - tokens_bytes)
        size = kvjax.nbytes(cache)["device"]
        assert_no_copy(program, size, size // CONFIG.num_hidden_layers)
    assert temporary[1] <= temporary[0]
