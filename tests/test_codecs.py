"""Codecs alone: packing, bytes, error bounds, and products."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvjax
from kvjax.codecs import (
    Codebook,
    Float8,
    HalfQuadratic,
    Int1,
    Int2,
    Int3,
    Int4,
    Int8,
    Integer,
    MixedPrecision,
    Raw,
    Rotated,
    TurboQuant,
    scales,
)
from kvjax.codecs.integer import pack, unpack
from kvjax.codecs.scales import rounded
from kvjax.core.pytree import tree_bytes
from tests.matrix import CODECS, FULL

BLOCK, DIM = 64, 64


@functools.cache
def stored_and_back(codec):
    """``encode`` and then ``decode``, as one program."""

    @jax.jit
    def both(x):
        store = codec.encode(x)
        return store, codec.decode(store)

    return both


def back(codec, x):
    """Numbers after ``encode`` and ``decode``."""
    return np.asarray(stored_and_back(codec)(np.asarray(x))[1])


BITS = (1, 2, 3, 4, 5, 8)
GROUPS = [("token", None), ("token", 16), ("channel", None), ("channel", 32), ("head", None),
          ("tensor", None)]  # fmt: skip


def resolved(codec, dtype="float32"):
    return codec.resolve(dtype, jax.default_backend())


def blocks(seed=0, batch=2, heads=2, count=3, block=BLOCK, dim=DIM):
    """Numbers similar to keys: channels differ in scale and mean, and some tokens are outliers."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(batch, heads, count, block, dim))
    x = x * np.exp(random.normal(size=(1, heads, 1, 1, dim))) + random.normal(size=dim)
    x[..., 5, :] *= 20
    return x.astype(np.float32)


@pytest.mark.slow
@given(st.sampled_from(BITS), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_packing_round_trips(bits, eights, width, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, 8 * eights, width), np.uint8)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (2, eights * bits, width)
    assert packed.size * 8 == codes.size * bits
    assert np.array_equal(np.asarray(unpack(packed, bits)), codes)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(
    x=hnp.arrays(
        np.float32, 20,
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
    )
)  # fmt: skip
def test_directed_rounding_to_16_bits(dtype, x):
    largest = float(jnp.finfo(dtype).max)
    x = np.clip(x, -largest, largest)
    x[np.abs(x) < 1e-37] = 0  # a CPU takes numbers this small for 0
    for up in (True, False):
        found = np.asarray(rounded(jnp.asarray(x), dtype, up=up))
        assert np.array_equal(found, found.astype(jnp.dtype(dtype)).astype(np.float32))
        assert np.all(found >= x) if up else np.all(found <= x)
        step = np.maximum(np.abs(x) * float(jnp.finfo(dtype).eps), 1e-7)
        assert np.all(np.abs(found - x) <= step)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nbytes(name, dtype):
    codec = resolved(CODECS[name], dtype)
    shape = (2, 2, 3, 8, 8)
    empty = jax.eval_shape(lambda: codec.empty(shape))
    encoded = jax.eval_shape(lambda: codec.encode(jnp.zeros(shape, dtype)))
    decoded = jax.eval_shape(codec.decode, empty)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), empty) == jax.tree.map(
        lambda x: (x.shape, x.dtype), encoded
    )
    assert codec.nbytes(shape) == tree_bytes(encoded)
    assert decoded.dtype == jnp.dtype(dtype)
    assert decoded.shape == shape


@pytest.mark.parametrize(
    ("codec", "percent"),
    [
        (Int8(), 51.6), (Int4(), 26.6), (Int2(), 14.1),
        (Int8("channel"), 51.6), (Int4("channel"), 26.6),
        (Int2("channel"), 14.1), (Int4(zero_point=True), 28.1),
        (Int2("channel", zero_point=True), 15.6), (Int3(), 20.3),
        (Int1(), 7.8), (Float8(), 51.6), (Codebook(2, group_size=32), 15.6), (TurboQuant(4), 26.6),
        (MixedPrecision(Int4("channel", zero_point=True)), 28.9),
        (MixedPrecision(Int2("channel", zero_point=True)), 16.4),
    ],
)  # fmt: skip
def test_bytes_of_a_group(codec, percent):
    shape = (1, 2, 16, BLOCK, DIM)
    raw = Raw("bfloat16").nbytes(shape)
    assert round(100 * resolved(codec, "bfloat16").nbytes(shape) / raw, 1) == percent


def scale_of(codec, store):
    """The scale of each number."""
    return np.asarray(_scales(codec, store))


@functools.partial(jax.jit, static_argnums=0)
def _scales(codec, store):
    scale = codec.groups.unpack(codec.scales.decode(store.scale).astype(jnp.float32))
    shape = codec.groups.split(jnp.zeros((1, 1, 1, BLOCK, DIM))).shape[-4:]
    return codec.groups.join(jnp.broadcast_to(scale, (*scale.shape[:-4], *shape)))


def empty(codec, shape=(1, 1, 1, 64, 64)):
    return resolved(codec).empty(shape)


KINDS = ("normal", "outliers", "constant", "zeros", "subnormal", "offset", "huge", "steps")


def numbers(kind, seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(1, 2, 1, BLOCK, DIM))
    if kind == "outliers":
        x[random.random(x.shape) < 0.01] *= 1e4
    if kind in ("constant", "zeros"):
        x = np.full(x.shape, 0.0 if kind == "zeros" else random.normal())
    factor = {"subnormal": 1e-40, "huge": 1e35}.get(kind, 1.0)
    offset = {"offset": 300.0}.get(kind, 0.0)
    return (np.round(x) if kind == "steps" else x * factor + offset).astype(np.float32)


@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("bits", BITS)
@given(st.sampled_from(GROUPS), st.sampled_from(KINDS), st.integers(0, 100))
@example(("channel", None), "outliers", 49)  # the furthest of 303 draws, at 8 bits
def test_the_error_is_at_most_half_a_scale(bits, zero_point, group, kind, seed):
    codec = resolved(Integer(bits, *group, zero_point=zero_point))
    x = numbers(kind, seed)
    store, found = stored_and_back(codec)(x)
    found, scale = np.asarray(found), scale_of(codec, store)
    error = np.abs(found - x)
    tiny = 1e-36 + 1e-6 * np.abs(x)
    if bits > 1:
        # The distance from the zero point and the quotient are rounded once each in float32, by
        # half of 2**-23 per scale.
        assert np.all(error <= scale * (0.5 + 2.0**bits * 2**-23) + tiny)
    else:  # two values, about the mean: as a whole they are nearer than the mean alone
        axes = tuple(range(x.ndim))
        wide = x.astype(np.float64)
        mean = wide.mean(axes, keepdims=True) if zero_point else 0.0
        if group[0] == "tensor":
            bound = ((wide - mean) ** 2).mean() * 1.02 + (0.01 * np.abs(wide).max()) ** 2 + 1e-30
            assert (error.astype(np.float64) ** 2).mean() <= bound or kind == "huge"
    if kind == "zeros":
        assert np.all(found == 0)
    if kind == "constant":
        assert np.all(error <= np.abs(x) / 100)


@pytest.mark.parametrize(
    ("kind", "relative", "least"), [("e4m3", 2**-4, 2**-10), ("e5m2", 2**-3, 2**-17)]
)
@given(st.sampled_from(GROUPS), st.sampled_from(KINDS), st.integers(0, 100))
def test_float8_keeps_relative_precision(kind, relative, least, group, shape, seed):
    codec = resolved(Float8(kind, *group))
    x = numbers(shape, seed)
    store, found = stored_and_back(codec)(x)
    found, scale = np.asarray(found), scale_of(codec, store)
    assert np.all(np.abs(found - x) <= np.maximum(relative * np.abs(x), least * scale) + 1e-36)


@pytest.mark.parametrize("name", CODECS)
def test_nan_is_stored_as_a_number(name):
    codec = resolved(CODECS[name])
    x = blocks(block=8, dim=8)
    x[0, 0, 0, 0, :3] = np.nan, np.inf, -np.inf
    assert np.all(np.isfinite(back(codec, x)))


@pytest.mark.parametrize("name", CODECS)
def test_products_equal_those_of_decoded_numbers(name):
    codec = resolved(CODECS[name])
    random = np.random.default_rng(1)
    store, plain = stored_and_back(codec)(blocks(block=8, dim=8))
    plain = np.asarray(plain, np.float64).reshape(2, 2, 24, 8)
    queries = random.normal(size=(2, 2, 5, 8)).astype(np.float32)
    weights = random.random(size=(2, 2, 5, 24)).astype(np.float32)
    products = jax.jit(
        lambda q, w, store: (codec.scores(q, store), codec.weighted_values(w, store))
    )
    truth = queries @ plain.swapaxes(2, 3), weights @ plain
    for found, wanted in zip(products(queries, weights, store), truth, strict=True):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_8_bit_float_is_decoded_exactly(kind):
    bits = np.arange(256, dtype=np.uint8)
    wanted = bits.view(jnp.dtype(scales.KINDS[kind])).astype(np.float32)
    found = np.asarray(jax.jit(scales.float8_to_float32, static_argnums=1)(bits, kind))
    finite = np.isfinite(wanted)
    assert finite.sum() >= 248 and np.array_equal(found[finite], wanted[finite])


@pytest.mark.slow(but=[f"{name}-16-8" for name in CODECS])
@pytest.mark.parametrize(("block", "dim"), [(16, 8), (64, 64), (16, 80)])
@pytest.mark.parametrize("name", CODECS)
def test_encoding_does_not_depend_on_other_blocks(name, block, dim):
    """A block has the same bytes alone, with other blocks, in other batches, and without jit."""
    codec, x = resolved(CODECS[name]), jnp.asarray(blocks(count=5, block=block, dim=dim))
    whole = jax.tree.leaves(jax.jit(codec.encode)(x))
    companies = itertools.product((1, 2), (1, 2)) if FULL else ((1, 1), (2, 2))
    for size, batch in companies:
        encode = jax.jit(codec.encode)
        for start in range(0, 5 - size + 1):
            part = jax.tree.leaves(encode(x[:batch, :, start : start + size]))
            for a, b in zip(whole, part, strict=True):
                wanted = np.asarray(a)[:batch, :, start : start + size]
                assert np.array_equal(wanted, np.asarray(b))


def test_half_quadratic_lowers_its_error():
    x = jnp.asarray(blocks())
    for per in ("token", "channel"):
        codec = resolved(Int2(per, zero_point=True))
        searched = HalfQuadratic(codec)
        errors = [np.abs(back(c, x) - np.asarray(x)) ** 0.7 for c in (codec, searched)]
        axis = -1 if per == "token" else -2
        plain, better = (error.mean(axis) for error in errors)
        assert np.all(better <= plain * (1 + 1e-5)) and better.mean() < 0.97 * plain.mean()


def test_rotation_spreads_outliers():
    x = np.random.default_rng(0).normal(size=(1, 2, 4, BLOCK, DIM)).astype(np.float32)
    x[..., 7] *= 50
    plain = resolved(Int4())
    rotated = Rotated(plain)
    errors = [float(np.mean((back(c, x) - x) ** 2)) for c in (plain, rotated)]
    assert errors[1] < errors[0] / 3


@pytest.mark.slow(but=("5", "6", "12", "8"))
@pytest.mark.parametrize("dim", [5, 6, 8, 12, 80, 128])
def test_rotation_keeps_products(dim):
    codec = resolved(Rotated(Float8(), seed=3))
    x = np.random.default_rng(0).normal(size=(1, 1, 1, 8, dim)).astype(np.float32)
    transformed = np.asarray(codec._transform_exactly(jnp.asarray(x)))
    back = np.asarray(codec.inverse_transform(jnp.asarray(transformed)))
    np.testing.assert_allclose(back, x, atol=1e-5)
    queries = np.random.default_rng(1).normal(size=(1, 1, 1, 3, dim)).astype(np.float32)
    rotated = np.asarray(codec.transform(jnp.asarray(queries)))
    np.testing.assert_allclose(
        rotated @ transformed.swapaxes(-1, -2), queries @ x.swapaxes(-1, -2), atol=1e-4
    )


@pytest.mark.slow
def test_quantize_kv():
    x = np.random.default_rng(0).normal(size=(2, 3, 77, 40)).astype(np.float32)
    for codec in (
        Int8(),
        Int4("channel", zero_point=True),
        Raw(),
    ):
        keys, values = kvjax.codecs.quantize_kv(x, 2 * x, codec)
        k, v = kvjax.codecs.dequantize_kv(keys, values)
        assert k.shape == v.shape == x.shape and k.dtype == jnp.float32
        assert np.abs(np.asarray(k) - x).max() < 0.3
        np.testing.assert_allclose(np.asarray(v), 2 * np.asarray(k), atol=1e-5)
    pair = kvjax.codecs.quantize_kv(x, x, Int8(), Int2())
    assert pair[0].nbytes > 3 * pair[1].nbytes
    jitted = jax.jit(lambda x: kvjax.codecs.dequantize_kv(*kvjax.codecs.quantize_kv(x, x, Int8())))(
        x
    )
    assert jitted[0].shape == x.shape


def test_absmax_int8():
    """Absmax int8: one scale per row, and 127 as the largest code."""
    x = np.random.default_rng(0).normal(size=(2, 3, 77, 40)).astype(np.float32)
    codec = Int8(per="tensor", scales=Raw("float16"))
    keys, _ = kvjax.codecs.quantize_kv(x, x, codec, block=None)
    assert keys.store.scale.size == 2 and keys.store.codes.shape[2] == 1
    scale = np.abs(x).max((1, 2, 3), keepdims=True) / 127
    wanted = np.round(x / scale) * scale
    found = np.asarray(kvjax.codecs.dequantize_kv(keys, keys)[0])
    assert np.abs(found - wanted).max() <= 1.01 * scale.max()
    assert np.mean(np.abs(found - wanted) > 0.2 * scale) < 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Integer(6), "bits=6: choose from 1, 2, 3, 4, 5, 8"),
        (lambda: Int4("row"), "per='row': choose from token, channel, head, tensor"),
        (lambda: Int4("head", 8), "group_size=8: scales per head have no groups"),
        (lambda: Int4(group_size=0), "group_size must be an integer >= 1, got 0"),
        (lambda: Int4(scales=Raw("float32")), "scales are float16 or bfloat16, not float32"),
        (lambda: Float8("e3m4"), "kind='e3m4': choose from e4m3, e5m2"),
        (lambda: HalfQuadratic(Int4()), "has none: give it an integer codec with"),
        (lambda: Codebook(8), "bits=8: choose from 1, 2, 3, 4"),
        (lambda: MixedPrecision(Int4()), "needs an Integer with scales per channel, not Integer"),
        (lambda: MixedPrecision(Int8("channel")), "codes of 2, 3 or 4 bits, not of 8"),
        (lambda: empty(MixedPrecision(Int4("channel")), (1, 1, 1, 8, 5)), "=5 must be even"),
        (lambda: empty(Codebook(2), (1, 1, 1, 12, 64)), "12 tokens must be a multiple of 8"),
        (lambda: Rotated(Int4), "Rotated wraps a codec, not <function Int4"),
        (lambda: empty(Int4(group_size=48)), "does not divide head_dim, 64"),
        (lambda: empty(Int4(group_size=128)), "does not divide head_dim, 64"),
        (lambda: empty(Int4("channel", 128)), "the block's tokens, 64"),
        (lambda: empty(Int4(), (1, 1, 1, 12, 64)), "12 tokens must be a multiple of 8"),
        (lambda: Int4().empty((1, 1, 1, 8, 8)), "has no dtype for its scales yet"),
        (lambda: kvjax.CachePolicy(keys=Int4(), block=12), "block=12: packed codes need"),
        (lambda: kvjax.CachePolicy(keys=Int4(), recent=-1), "recent must be a"),
        (lambda: kvjax.CachePolicy(prefill="raw"), "prefill='raw': use 'sight' or 'exact'"),
        (lambda: kvjax.CachePolicy(keys=Int4), "keys of a CachePolicy is <function Int4"),
        (lambda: kvjax.codecs.quantize_kv(*[np.zeros((2, 3, 0, 8), np.float32)] * 2, Int8()),
         r"are \[batch, kv_heads, tokens, head_dim\], got \[2, 3, 0, 8\]"),
    ],
)  # fmt: skip
def test_wrong_settings_raise(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_no_gradient_is_silently_zero():
    def loss(x, codec):
        return kvjax.codecs.dequantize_kv(*kvjax.codecs.quantize_kv(x, x, codec))[0].sum()

    x = jnp.ones((1, 1, 8, 8))
    for codec in (
        Int8(),
        Float8(),
        HalfQuadratic(Int4(zero_point=True)),
        Codebook(2),
        MixedPrecision(Int4("channel")),
    ):
        with pytest.raises(ValueError, match="a quantized cache has no gradient"):
            jax.grad(loss)(x, codec)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_largest_numbers_stay_finite(name, dtype):
    """Scales are rounded up and means are sums, but neither overflows a dtype: in an empty slot
    0 * inf would be NaN."""
    codec = resolved(CODECS[name], dtype)
    largest = np.full((1, 2, 1, 64, 16), np.finfo(dtype).max, dtype)
    for numbers in (largest, -largest, np.where(np.arange(16) % 2, largest, -largest)):
        assert np.isfinite(back(codec, numbers).astype(np.float32)).all()


@pytest.mark.parametrize("tokens", [3, 11, 64])
def test_padding_keeps_means(tokens):
    x = np.random.default_rng(0).normal(size=(1, 2, tokens, 16)).astype(np.float32)
    codec = Int1("channel", zero_point=True)
    found = kvjax.codecs.dequantize_kv(*kvjax.codecs.quantize_kv(x, x, codec))[0]
    mean = x.mean(axis=2, keepdims=True)
    spread = np.abs(x - mean).mean(axis=2, keepdims=True)
    wanted = np.where(x > mean, mean + spread, mean - spread)
    # Groups of 64 do not have equally many numbers of each token.
    assert np.abs(found - wanted).mean() < (0.02 if 64 % tokens == 0 else 0.1)


def test_transformers_residuals_shorter_than_a_block():
    """As in Transformers' own tests: only the newest block stays raw."""
    policy = kvjax.policies.transformers_policy(residual_length=4)
    assert (policy.block, policy.recent, policy.keys.group_size) == (8, 0, 64)
    assert kvjax.policies.transformers_policy(residual_length=8) == policy
    with pytest.raises(ValueError, match="residual_length must be an integer >= 1"):
        kvjax.policies.transformers_policy(residual_length=0)
