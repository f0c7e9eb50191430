"""The copy law: no step moves a cache, or half a layer of one, in vain."""

import functools

import jax
import jax.numpy as jnp
import pytest
from copies import assert_no_copy, copies
from jax import lax
from matrix import CODECS, cells, tiny_config

import kvjax
from kvjax.core.trees import tree_bytes
from kvjax.models.architecture import Architecture

CONFIG = tiny_config(num_hidden_layers=2, windows=(None, None), head_dim=16)
MODEL = Architecture(CONFIG)


def one_step(params, token, cache):
    logits, cache = MODEL.apply(params, token[:, None], cache)
    return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), cache


def loop_of_steps(params, token, cache):
    def go_on(carry):
        return jnp.all(carry[1].length < carry[2])

    def step(carry):
        token, cache = one_step(params, *carry[:2])
        return token, cache, carry[2]

    return lax.while_loop(go_on, step, (token, cache, cache.length[0] + 5))[:2]


def scan_of_steps(params, token, cache):
    def step(carry, _):
        carry = one_step(params, *carry)
        return carry, carry[0]

    (_, cache), tokens = lax.scan(step, (token, cache), length=5)
    return tokens, cache


def chunk(params, token, cache):
    tokens = jnp.tile(token[:, None], (1, 16))
    return MODEL.apply(params, tokens, cache, last_only=True, lengths=token)


PAIRS = [(a, b) for a, b in zip([*CODECS][::2], [*CODECS][1::2], strict=True)]


def coded(layout, names, size):
    """A codec a layer, for keys and values; with rings, sinks."""
    held = kvjax.Dense() if layout == "dense" else kvjax.Ring(size // 2, sinks=4)
    return [kvjax.CachePolicy(held, CODECS[name], CODECS[name]) for name in names]


CODED = {
    f"{layout}-{'-'.join(names)}": functools.partial(coded, layout, names)
    for layout in ("dense", "ring")
    for names in PAIRS
}
POLICIES = {
    "dense": lambda size: kvjax.policy("static"),
    "dense-bfloat16": lambda size: kvjax.policy("static", dtype="bfloat16"),
    "dense-float16": lambda size: kvjax.policy("static", dtype="float16"),
    "growing": lambda size: kvjax.CachePolicy(kvjax.Growing(start=size)),
    "ring": lambda size: kvjax.policy("sliding_window", window=size // 2, slack=128),
    "ring-bfloat16": lambda size: kvjax.policy("sliding_window", window=size, dtype="bfloat16"),
    "ring-sinks": lambda size: kvjax.policy("sliding_window", window=size // 2, sinks=4),
    "listed": lambda size: [
        kvjax.CachePolicy(kvjax.Ring(size // 2, sinks=1)), kvjax.CachePolicy(kvjax.Dense()),
    ],
    **CODED,
}  # fmt: skip
"""The policies of the law matrix, at sizes that a copy of would show."""
FORMS = {"step": one_step, "while_loop": loop_of_steps, "scan": scan_of_steps, "chunk": chunk}


def compiled(form, policy, batch, max_len):
    params = MODEL.abstract_params()
    cache = jax.eval_shape(lambda: kvjax.init_cache(CONFIG, policy, batch=batch, max_len=max_len))
    token = jax.ShapeDtypeStruct((batch,), jnp.int32)
    program = jax.jit(FORMS[form], donate_argnums=2).lower(params, token, cache).compile()
    return program, cache


def of_all(forms, **some):
    """Each form with the raw policies, and with some or all of the coded ones."""
    for number, form in enumerate(forms):
        yield from (pytest.param(form, name) for name in POLICIES if name not in CODED)
        for cell in cells(CODED, first=number, **some):
            yield pytest.param(form, *cell.values, marks=cell.marks)


@pytest.mark.parametrize(
    ("form", "name"), [*of_all(["step"], one_in=1), *of_all([*FORMS][1:], one_in=3)]
)
def test_cache_is_aliased_and_never_copied(form, name):
    # A block of 1,024 tokens, decoded, is more than half of 8,192 tokens of one bit each.
    temporary = []
    for max_len in (131072, 524288) if name in CODED else (8192, 32768):
        program, cache = compiled(form, POLICIES[name](max_len), 2, max_len)
        smallest = min(tree_bytes(layer) for layer in cache.layers)
        assert_no_copy(program, kvjax.nbytes(cache)["device"], smallest)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("batch", [1, 8])
def test_batches_do_not_copy(batch):
    program, cache = compiled("step", kvjax.policy("static"), batch, 4096)
    size = kvjax.nbytes(cache)["device"]
    assert_no_copy(program, size, size // CONFIG.num_hidden_layers)


@pytest.mark.parametrize("form", ["while_loop", "scan"])
@pytest.mark.parametrize("name", ["dense", "dense-int8-int4", "ring-int8-int4"])
def test_a_single_row_is_not_copied_in_a_loop(form, name):
    # Its axis of length 1 lets a compiler order a body in another way in the loop than outside.
    size = 131072
    program, cache = compiled(form, POLICIES[name](size), 1, size)
    smallest = min(tree_bytes(layer) for layer in cache.layers)
    assert_no_copy(program, kvjax.nbytes(cache)["device"], smallest)
    assert program.memory_analysis().temp_size_in_bytes < smallest // 2


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
