"""A step with a cache is an ordinary function: differentiate, vmap, scan, jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import kvjax
from tests.alive import alive
from tests.matrix import tiny_model

MODEL, PARAMS = tiny_model()
CONFIG = MODEL.config
STEP = jax.jit(MODEL.apply, donate_argnums=2)
TOKENS = jax.random.randint(jax.random.key(3), (2, 12), 0, CONFIG.vocab_size)


def loss_of(logits, tokens):
    picked = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(picked, tokens[:, 1:, None], axis=-1).mean()


def uncached(params):
    return loss_of(MODEL.apply(params, TOKENS), TOKENS)


def prefilled(params):
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=300)
    first, cache = MODEL.apply(params, TOKENS[:, :7], cache)
    rest, cache = MODEL.apply(params, TOKENS[:, 7:], cache)
    return loss_of(jnp.concatenate([first, rest], axis=1), TOKENS)


def decoded(params):
    def step(cache, token):
        logits, cache = MODEL.apply(params, token[:, None], cache)
        return cache, logits[:, 0]

    cache = kvjax.init_cache(CONFIG, batch=2, max_len=300)
    return loss_of(lax.scan(step, cache, TOKENS.T)[1].swapaxes(0, 1), TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [pytest.param(prefilled, marks=pytest.mark.rare), decoded])
def test_gradients_through_a_cache(loss):
    """Against the training pass, and against finite differences in a random direction."""
    value, gradient = jax.jit(jax.value_and_grad(loss))(PARAMS)
    wanted_value, wanted = jax.jit(jax.value_and_grad(uncached))(PARAMS)
    assert abs(value - wanted_value) < 1e-5
    for found, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        found, right = np.asarray(found), np.asarray(right)
        assert np.abs(found - right).max() <= 1e-4 * np.abs(right).max() + 1e-6
        assert np.abs(right).max() > 0

    leaves, tree = jax.tree.flatten(PARAMS)
    rng = np.random.default_rng(0)
    along = [rng.normal(size=x.shape).astype(np.float32) for x in leaves]
    slope = sum(np.vdot(a, g) for a, g in zip(along, jax.tree.leaves(gradient), strict=True))

    @jax.jit
    def at(distance):
        moved = [x + distance * a for x, a in zip(leaves, along, strict=True)]
        return loss(jax.tree.unflatten(tree, moved))

    small = 3e-4
    difference = (at(small) - at(-small)) / (2 * small)
    assert abs(difference - slope) < 0.02 * abs(slope) + 5e-3


def test_a_16_bit_cache_refuses_gradients_or_gives_them():
    """Never zeros in silence: where the bits are kept as integers, differentiating is an error."""

    def loss(params):
        cache = kvjax.init_cache(CONFIG, kvjax.policy(dtype="bfloat16"), batch=2, max_len=16)
        logits, _ = MODEL.apply(params, TOKENS, cache)
        return loss_of(logits, TOKENS)

    resolved = kvjax.policy(dtype="bfloat16").resolve(16, None, "float32")
    if resolved.keys.as_bits:
        with pytest.raises(ValueError, match="a 16-bit cache has no gradient"):
            jax.jit(jax.grad(loss))(PARAMS)
    else:
        found = jax.jit(jax.grad(loss))(PARAMS)["model"]["layers"]["0"]["self_attn"]["k_proj"][
            "weight"
        ]
        wanted = jax.jit(jax.grad(uncached))(PARAMS)["model"]["layers"]["0"]["self_attn"]["k_proj"]
        assert jnp.abs(found - wanted["weight"]).max() < 0.05 * jnp.abs(wanted["weight"]).max()


@pytest.mark.slow
def test_vmap_over_separate_caches():
    """Three texts, each with a cache of its own of one row, at different lengths."""
    texts = jax.random.randint(jax.random.key(4), (3, 1, 8), 0, CONFIG.vocab_size)
    lengths = jnp.asarray([[8], [5], [2]], jnp.int32)

    def run(tokens, lengths):
        cache = kvjax.init_cache(CONFIG, batch=1, max_len=300)
        _, cache = MODEL.apply(PARAMS, tokens, cache, lengths=lengths)
        return MODEL.apply(PARAMS, tokens[:, :1], cache)

    together, caches = jax.jit(jax.vmap(run))(texts, lengths)
    assert caches.length.tolist() == [[9], [6], [3]]
    single = jax.jit(run)
    for row in range(3):
        alone, _ = single(texts[row], lengths[row])
        assert jnp.abs(together[row] - alone).max() <= 1e-5 * jnp.abs(alone).max()


def test_a_users_step_compiles_once_as_the_cache_fills():
    step = jax.jit(MODEL.apply, donate_argnums=2)
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=64)
    for position in range(10):
        _, cache = step(PARAMS, TOKENS[:, position : position + 1], cache)
    assert step._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.rare
def test_donation_leaves_no_second_cache_alive():
    step = STEP
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=64)
    _, cache = step(PARAMS, TOKENS[:, :1], cache)
    shape = cache.layers[0].keys.shape

    def held():
        return sum(array.shape == shape for array in alive())

    before = held()
    for _ in range(3):
        _, cache = step(PARAMS, TOKENS[:, :1], cache)
    assert held() == before


def test_custom_attention_with_what_read_gives():
    cache = kvjax.init_cache(CONFIG, batch=1, max_len=8)
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 3, 8)), jnp.float32)
    queries = jnp.tile(keys, (1, 2, 1, 1)) * 2
    cache = kvjax.append(cache, 0, keys, keys + 1)
    mixed = kvjax.attend(queries, cache, 0)
    held, values, positions = kvjax.read(cache, 0)
    scores = jnp.einsum("bhqd,bhkd->bhqk", queries, jnp.repeat(held, 2, 1)) / 8**0.5
    seen = (positions >= 0)[:, None, None] & (positions[:, None, None] <= jnp.arange(3)[:, None])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    wanted = jnp.einsum("bhqk,bhkd->bhqd", weights, jnp.repeat(values, 2, 1))
    assert jnp.abs(mixed - wanted).max() < 1e-5


def test_nan_in_a_users_own_loop_is_recorded_and_raised():
    broken = jax.tree.map(lambda x: x * jnp.nan, PARAMS)
    cache = kvjax.init_cache(CONFIG, "static", batch=2, max_len=8)
    step = jax.jit(MODEL.apply)
    _, cache = step(PARAMS, TOKENS[:, :1], cache, lengths=np.asarray([1, 1]))
    kvjax.check(cache)
    _, cache = step(broken, TOKENS[:, 2:3], cache, lengths=np.asarray([1, 0]))
    with pytest.raises(kvjax.NonFiniteError, match=r"row\(s\) 0 are not finite"):
        kvjax.check(cache)


def test_wrong_inputs_are_refused_in_a_sentence():
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=8)
    with pytest.raises(ValueError, match=r"tokens must be \[batch, new\], each at least 1"):
        MODEL.apply(PARAMS, TOKENS[:, :0], cache)
    fewer = kvjax.KVCache(cache.layers[:1], cache.length, cache.written[:, :1], cache.status)
    with pytest.raises(ValueError, match="the cache has 1 layers, the model 2"):
        MODEL.apply(PARAMS, TOKENS, fewer)
    one = jnp.zeros((2, 2, 1, 8))
    with pytest.raises(ValueError, match="layer must be an integer >= 0, got -1"):
        kvjax.append(cache, -1, one, one)
    with pytest.raises(ValueError, match="unknown dtype 'int4x'"):
        kvjax.policy(dtype="int4x")


@pytest.mark.slow
def test_an_attribute_of_a_module_of_flax():
    """A cache and a rotary table are data there: a jitted call goes on with what the last left."""

    class Layer(nnx.Module):
        def __init__(self):
            self.table = kvjax.rotary_table(np.ones(CONFIG.head_dim // 2, np.float32))
            self.cache = kvjax.init_cache(CONFIG, kvjax.policy(bits=4), batch=2, max_len=32)

        def __call__(self, x):
            for layer in range(CONFIG.num_hidden_layers):
                self.cache = kvjax.append(self.cache, layer, x, x, rotary=self.table)
            mixed = kvjax.attend(x, self.cache, 0, rotary=self.table)
            self.cache = kvjax.advance(self.cache, x.shape[2])
            return mixed

    shape = (2, CONFIG.num_key_value_heads, 3, CONFIG.head_dim)
    numbers = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    layer, eager = Layer(), Layer()
    call = nnx.jit(lambda module, x: module(x))
    for x in numbers:
        np.testing.assert_allclose(call(layer, x), eager(x), atol=1e-5)
    assert layer.cache.length.tolist() == [6, 6]
    graph, state = nnx.split(layer)
    assert nnx.merge(graph, state).cache.length.tolist() == [6, 6]
