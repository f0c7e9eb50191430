"""TPUs, interpreted on a CPU: storage orders, writes, and the kernel.

The kernel is interpreted as a TPU runs it. Races and reads out of bounds are errors, and memory
that was never written holds NaN.
"""

import dataclasses
import functools
import sys
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax.attention import attend, softmax
from kvjax.attention.kernels import common, mosaic_tpu
from kvjax.codecs import (
    Centered,
    Codec,
    Float8,
    HalfQuadratic,
    Int2,
    Int3,
    Int4,
    Int8,
    Rotated,
    TurboQuant,
    Unrotated,
)  # fmt: skip
from kvjax.core.compat import JAX
from kvjax.core.target import Target, tracing_for
from kvjax.layouts import Growing, Paged, Ring
from kvjax.placement.mesh import MeshSharding
from kvjax.placement.order import orders_of
from tests.matrix import tiny_config

HEADS, KV, TOKENS = 4, 2, 384
INT4 = Int4("channel", zero_point=True)

POLICIES = {
    "raw": kvjax.CachePolicy(),
    "sinks": kvjax.CachePolicy(Ring(160, sinks=4, slack=159)),
    "pages": kvjax.CachePolicy(Paged(128)),
    "pages-int4": replace(kvjax.policy(bits=4), layout=Paged(128)),
    "pages-sinks": kvjax.CachePolicy(Paged(128, Ring(160, sinks=4, slack=159))),
    "int8": kvjax.policy(bits=8),
    "int4": kvjax.policy(bits=4),
    "int4-int2": kvjax.policy(key_bits=4, value_bits=2),
    "int2": kvjax.policy(bits=2),
    "sinks-int2": kvjax.CachePolicy(
        Ring(160, sinks=4, slack=159),
        Int2(group_size=32),
        Int2(zero_point=True),
    ),
    "float8": kvjax.CachePolicy(keys=Float8("e5m2", "channel"), values=Float8()),
    "rotated": kvjax.CachePolicy(
        keys=Rotated(Int4()),
        values=Rotated(Int4()),
    ),
    "turbo": kvjax.CachePolicy(keys=TurboQuant(4), values=TurboQuant(2), sinks=4),
    "centered": kvjax.CachePolicy(keys=Centered(Int4()), values=Int8("channel")),
    "raw-int4": kvjax.CachePolicy(values=Int4(zero_point=True)),
    "half-quadratic": kvjax.CachePolicy(
        keys=HalfQuadratic(Int4(zero_point=True)),
        values=Unrotated(INT4),
    ),
}
"""Policies for the kernel: each codec that it reads, and each storage order, once."""


STRICTLY = JAX >= (0, 8)
"""Whether kernels can be interpreted strictly. JAX 0.7 can't interpret a kernel in a branch."""


def assert_no_races():
    """Assert that the last interpreted kernels had no races."""
    if STRICTLY:
        from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

        assert interpreter.races is None or not interpreter.races.races_found


@pytest.fixture
def strict(monkeypatch):
    """Kernels with small tiles, so that a short sequence has several, interpreted strictly."""
    monkeypatch.setattr(mosaic_tpu, "MAX_TOKENS", 128)
    monkeypatch.setattr(mosaic_tpu, "MAX_ROWS", 128)
    if STRICTLY:
        monkeypatch.setattr(common, "INTERPRETED", pltpu.InterpretParams(
            detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
        ))  # fmt: skip
    # Do not reuse traces that were made with other settings, or leave traces with these.
    monkeypatch.setattr(attend, "_attend_once", attend._attend)
    monkeypatch.setattr(sys.modules[__name__], "call", in_one_program())


def in_one_program():
    """``append``, ``attend`` and ``advance`` of one layer, compiled together."""

    @functools.partial(jax.jit, static_argnames=("path", "settings"))
    def call(cache, queries, keys, values, lengths, path, settings=()):
        cache = kvjax.append(cache, 0, keys, values, lengths=lengths)
        mixed = kvjax.attend(queries, cache, 0, path=path, lengths=lengths, **dict(settings))
        return mixed, kvjax.advance(cache, keys.shape[2], lengths)

    return call


call = in_one_program()


TARGETS = {"cpu": Target("cpu"), "tpu": Target("tpu"), "gpu": Target("gpu", (9, 0))}
"""The targets of these tests. The GPU is an H100."""


def run(policy, platform, path, head_dim, calls, dtype="float32", settings=()):
    """The attention outputs of several calls, and the cache after them."""
    config = tiny_config(
        num_hidden_layers=1, windows=(None,), num_key_value_heads=KV, head_dim=head_dim, dtype=dtype
    )
    with tracing_for(TARGETS[platform]):
        cache = kvjax.init_cache(config, policy, batch=2, max_len=TOKENS)
    generator, found = np.random.default_rng(0), []
    for new in calls:
        some = (
            jnp.asarray(generator.normal(size=(2, heads, new, head_dim)), dtype)
            for heads in (HEADS, KV, KV)
        )
        lengths = jnp.asarray([new, max(new * 2 // 3, 1)])
        mixed, cache = call(cache, *some, lengths, path, settings)
        real = np.arange(new) < np.asarray(lengths)[:, None]
        found.append(np.where(real[:, None, :, None], np.asarray(mixed, np.float32), 0))
    return found, cache


READ = jax.jit(lambda cache: kvjax.read(cache, 0))


def by_position(cache):
    """The keys and values of each row, by position."""
    keys, values, positions = (np.asarray(x, np.float32) for x in READ(cache))
    return [
        {int(p): (keys[row, :, n], values[row, :, n]) for n, p in enumerate(at) if p >= 0}
        for row, at in enumerate(positions)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        ("pages", 64, "float32"),
        pytest.param("sinks", 128, "float32", marks=pytest.mark.rare),
        pytest.param("raw", 256, "bfloat16", marks=pytest.mark.rare),
        pytest.param("pages-int4", 128, "float32", marks=pytest.mark.rare),
        pytest.param("pages-sinks", 128, "float32", marks=pytest.mark.rare),
        pytest.param("raw", 64, "float32", marks=pytest.mark.rare),
        *(pytest.param(name, 128, dtype, marks=pytest.mark.rare) for name, dtype in (
            ("int8", "float32"), ("int4-int2", "float32"),
            ("sinks-int2", "float32"), ("int4", "float32"), ("float8", "float32"),
            ("rotated", "float32"), ("centered", "float32"), ("raw-int4", "float32"),
            ("turbo", "float32"), ("half-quadratic", "float32"),
            ("int4", "bfloat16"), ("raw", "float32"),
        )),
    ],
)  # fmt: skip
def test_the_kernel_agrees_with_the_reference(name, head_dim, dtype, strict):
    """Over several tiles, in calls of one, several and many tokens."""
    some = (21,) if name in ("raw", "int4") else ()
    given = POLICIES[name], head_dim, (150, 150, *some, 1), dtype
    policy, *rest = given
    wanted, there = run(policy, "cpu", "reference", *rest)
    found, cache = run(policy, "tpu", "pallas", *rest)
    tolerance = 2e-2 if dtype == "bfloat16" else 5e-6
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())
    assert_no_races()
    kvjax.check(cache)
    for here, wanted in zip(by_position(cache), by_position(there), strict=True):
        assert wanted.keys() <= here.keys()  # a ring may have room for some more
        for position, numbers in wanted.items():
            np.testing.assert_array_equal(here[position], numbers)


RECOMPUTED = [
    ("raw", "tpu"), ("int4", "gpu"),
    *(pytest.param(name, "tpu", marks=pytest.mark.rare)
      for name in ("rotated", "int8", "int4-int2", "sinks-int2", "float8", "centered")),
    *(pytest.param(name, "gpu", marks=pytest.mark.rare)
      for name in ("raw", "int8", "float8", "pages-sinks")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "platform"), RECOMPUTED)
def test_any_chunks_give_one_pass(name, platform, strict, monkeypatch):
    """The recompute law with kernels: a sequence divided into any chunks gives the outputs and
    arrays of one pass."""
    if platform == "gpu":
        monkeypatch.setattr(common, "INTERPRETED", True)  # as is strict for TPUs' alone
    policy, total = POLICIES[name], 290
    cuts = (96, 1, 96, 96, 1), (145, 145)
    if platform == "gpu":  # whose threads are interpreted one by one
        total, cuts = 146, ((48, 1, 48, 48, 1), (73, 73))
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV, head_dim=64)
    generator = np.random.default_rng(1)
    text = [generator.normal(size=(2, n, total, 64)).astype("float32") for n in (HEADS, KV, KV)]

    def fed(platform, path, calls):
        with tracing_for(TARGETS[platform]):
            cache = kvjax.init_cache(config, policy, batch=2, max_len=TOKENS)
        begin, found = 0, []
        for new in calls:
            some = (x[:, :, begin : begin + new] for x in text)
            mixed, cache = call(cache, *some, jnp.array([new, new]), path)
            found.append(np.asarray(mixed))
            begin += new
        return np.concatenate(found, axis=2), cache

    whole = (145, total - 145) if "sinks" in name else (total,)  # as much as a ring has slack for
    wanted, _ = fed("cpu", "reference", whole)
    runs = [fed(platform, None, cut) for cut in cuts]
    for found, _ in runs:
        np.testing.assert_allclose(found, wanted, atol=5e-6 * np.abs(wanted).max())
    assert_no_races()
    assert_same(*(by_position(cache) for _, cache in runs))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [(("window", 70),), (("chunk", 96), ("soft_cap", 5.0)), (("window", 70), ("sinks", 3))],
    ids=str,
)
def test_the_kernel_and_settings(settings, strict):
    """Tiles before the window are not read."""
    given = POLICIES["raw"], "tpu", 128, (150, 9), "float32", settings
    policy, platform, *rest = given
    wanted, _ = run(policy, "cpu", "reference", *rest)
    found, _ = run(policy, platform, "pallas", *rest)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@jax.jit
def twice(cache, again):
    """The cache with its rows reversed, and rewound by nine tokens; and that cache in 8 bits."""
    both = kvjax.rewind(kvjax.concatenate([kvjax.select(cache, jnp.array([1, 0])), again]), 9)
    return both, kvjax.convert(both, kvjax.policy("static", bits=8), max_len=TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["raw", *(pytest.param(n, marks=pytest.mark.rare) for n in ("rotated", "int4"))]
)
def test_operations_on_a_tpu_cache(name):
    """Fork, select, grow, convert and rewind with the storage orders of a TPU."""
    found = []
    for platform in ("cpu", "tpu"):
        policy = replace(POLICIES[name], layout=Growing(start=256))
        _, cache = run(policy, platform, None, 64, (200,))
        with tracing_for(TARGETS[platform]):
            cache = kvjax.grow(cache, 384)
            both, other = twice(cache, kvjax.fork(cache))
        found.append([by_position(x) for x in (cache, both, other)])
    for here, there in zip(*found, strict=True):
        for row, wanted in zip(here, there, strict=True):
            assert row.keys() == wanted.keys()
            for position, numbers in wanted.items():
                np.testing.assert_array_equal(row[position], numbers)


@pytest.mark.slow(
    but=("int4-int2-80", "int4-int2-64", "raw-64", "raw-80", "float8-80", "float8-64")
)
@pytest.mark.parametrize(
    "head_dim", [64, 80, *(pytest.param(n, marks=pytest.mark.rare) for n in (128, 256))]
)
@pytest.mark.parametrize("name", ["int8", "int4", "int4-int2", "centered", "float8", "raw"])
def test_storage_orders_are_inverted_exactly(name, head_dim):
    """Orders are inverted exactly, units can be sliced, and tiles are filled."""
    policy = replace(POLICIES[name], block=64)
    codec = policy.keys.resolve("bfloat16", "tpu")
    block = 64 if policy.has_tail else None
    orders = orders_of("tpu", codec, block, head_dim, policy.subblocks(head_dim))
    shape = (2, 3, 5, 64, head_dim) if block else (2, 3, 5, head_dim)
    store = codec.encode(jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32"))
    for x, order in zip(jax.tree.leaves(store), jax.tree.leaves(orders), strict=True):
        kept = order.arrange(x)
        assert kept.ndim == 4 and kept.size == x.size
        np.testing.assert_array_equal(order.restore(kept), x)
        np.testing.assert_array_equal(order.restore(order.slice_units(kept, 1, 3)), x[:, :, 1:4])


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("codec", [Int8(), Int4("head"), INT4], ids=str)
def test_padded_tiles_for_the_host(codec, apart):
    """Tiles have eight rows. With separate heads, a device of a mesh has the tiles of its heads."""
    codec = codec.resolve("bfloat16", "tpu")
    orders = orders_of("tpu", codec, 64, 64, 1, 4, apart)
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 5, 64, 64)), "float32")
    store = codec.encode(numbers)
    for x, order in zip(jax.tree.leaves(store), jax.tree.leaves(orders), strict=True):
        kept = order.arrange(x)
        assert kept.shape[1] == 5 and kept.shape[3:] == (8, 128)
        np.testing.assert_array_equal(order.restore(kept), x)
        np.testing.assert_array_equal(order.restore(order.slice_units(kept, 1, 3)), x[:, :, 1:4])
        if apart and x.shape[1] > 1:
            each = kept.shape[2] // 4
            some = kept[:, :, each : 3 * each]
            np.testing.assert_array_equal(order.restore(some), x[:, 1:3])


@pytest.mark.parametrize(
    ("name", "prefetch"),
    [(name, prefetch) for name in ("int4-int2", "raw", "int8") for prefetch in (0, 1)],
)
@pytest.mark.rare
def test_bodies_on_the_host_of_a_tpu(name, prefetch):
    """Blocks move to the host row by row and back, in a storage order for the host."""
    policy = replace(POLICIES[name], placement=kvjax.Host(prefetch))
    wanted, there = run(policy, "cpu", "reference", 64, (150, 21, 1))
    found, cache = run(policy, "tpu", None, 64, (150, 21, 1))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert_same(by_position(cache), by_position(there))


@pytest.mark.slow(but=("int4",))
@pytest.mark.parametrize("name", ["raw", "int4"])
def test_a_cache_moves_to_the_host_of_a_tpu_and_back(name):
    """A cache moves to the host and, on a mesh, to other devices; its storage order changes."""
    policy, numbers = replace(POLICIES[name], placement=kvjax.Host()), {}
    _, cache = run(policy, "tpu", None, 64, (200,))
    wanted = by_position(cache)
    with tracing_for(Target("tpu")):
        for placement in (kvjax.Device(), kvjax.Host(), kvjax.Device()):
            cache = kvjax.migrate(cache, placement)
            numbers[placement] = by_position(cache)
    for found in numbers.values():
        assert_same(found, wanted)


@pytest.mark.rare
@pytest.mark.parametrize("name", [pytest.param("int8", marks=pytest.mark.rare), "int4"])
def test_bodies_on_the_hosts_of_a_mesh_of_tpus(name, monkeypatch):
    """Each device has the units of its heads. They move to the host and back."""
    monkeypatch.setattr(MeshSharding, "target", Target("tpu"))
    policy = replace(POLICIES[name], placement=kvjax.Host())
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=4, head_dim=64)
    numbers = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 200, 64)), "float32")
    mesh = kvjax.make_mesh(tensor=2)

    def filled(mesh):
        cache = kvjax.init_cache(config, policy, batch=2, max_len=256, mesh=mesh)
        cache = kvjax.append(cache, 0, numbers, numbers, lengths=jnp.array([200, 3]))
        return kvjax.advance(cache, 200, jnp.array([200, 3]))

    with tracing_for(Target("tpu")):
        wanted = by_position(filled(None))
        spread = filled(mesh)
        assert_same(by_position(spread), wanted)
        assert_same(by_position(kvjax.select(spread, jnp.array([1, 0]))), wanted[::-1])
        assert_same(by_position(kvjax.grow(filled(mesh), 512)), wanted)
        assert_same(by_position(kvjax.migrate(spread, mesh=None)), wanted)
        assert_same(by_position(kvjax.migrate(filled(None), mesh=mesh)), wanted)


@pytest.mark.slow(but=("raw-gpu",))
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("name", ["raw", pytest.param("int4", marks=pytest.mark.rare)])
def test_vmap_over_caches_of_accelerators(name, platform):
    """Three sequences of different lengths, each with its own cache."""
    config = tiny_config(num_hidden_layers=1, windows=(None,), head_dim=64)
    generator = np.random.default_rng(0)
    queries, keys, values = (
        jnp.asarray(generator.normal(size=(3, 1, heads, 90, 64)), "float32")
        for heads in (HEADS, KV, KV)
    )

    def run(queries, keys, values, length):
        with tracing_for(TARGETS[platform]):
            cache = kvjax.init_cache(config, POLICIES[name], batch=1, max_len=128)
        cache = kvjax.append(cache, 0, keys, values, lengths=length)
        return kvjax.attend(queries, cache, 0, lengths=length)[:, :, :3]

    given = queries, keys, values, jnp.asarray([[90], [64], [3]])
    together = jax.jit(jax.vmap(run))(*given)
    for row in range(3):
        alone = jax.jit(run)(*(x[row] for x in given))
        np.testing.assert_allclose(together[row], alone, atol=1e-5)


@pytest.mark.rare
def test_sections_in_any_order_are_one_softmax(strict, monkeypatch):
    """Also with transformed values, where a kernel can't continue from an earlier softmax."""
    given = POLICIES["rotated"], "tpu", "pallas", 64, (150,)
    wanted, _ = run(*given)
    in_order = softmax.sections
    turned = []
    monkeypatch.setattr(
        softmax, "sections", lambda *held: turned.append(1) or in_order(*held)[::-1]
    )
    monkeypatch.setattr(sys.modules[__name__], "call", in_one_program())
    found, _ = run(*given)
    assert turned
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def assert_same(found, wanted):
    """Equal bit for bit, by row and position."""
    for here, there in zip(found, wanted, strict=True):
        assert here.keys() == there.keys()
        for position, numbers in there.items():
            np.testing.assert_array_equal(here[position], numbers)


@pytest.mark.rare
def test_unsupported_calls_use_another_path():
    """By default another path serves them; ``path="pallas"`` raises with the reason."""
    cell = kvjax.policy(bits=3), "tpu"
    found, _ = run(*cell, None, 128, (100, 1))
    wanted, _ = run(kvjax.policy(bits=3), "cpu", "reference", 128, (100, 1))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    with pytest.raises(ValueError, match=r"'pallas' can't read .* tile by tile"):
        run(*cell, "pallas", 128, (1,))


@dataclasses.dataclass(frozen=True)
class Flat(Codec):
    """A codec that no kernel reads: it stores a block as one row."""

    dtype: str | None = None
    blockwise: ClassVar[bool] = True

    def resolve(self, model_dtype, platform):
        return Flat(self.dtype or model_dtype)

    def empty(self, shape):
        return jnp.zeros((*shape[:3], shape[3] * shape[4]), jnp.float16)

    def encode(self, x):
        return x.astype(jnp.float16).reshape(*x.shape[:3], -1)

    def decode(self, store):
        return store.reshape(*store.shape[:3], 64, -1).astype(self.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", pytest.param("gpu", marks=pytest.mark.rare)])
@pytest.mark.parametrize(
    "codec",
    [
        Flat(),
        Int3(),
        *(
            pytest.param(codec, marks=pytest.mark.rare)
            for codec in (Int4("head"), Centered(Int3()))
        ),
    ],
    ids=str,
)
def test_unsupported_codecs_use_another_path(codec, platform):
    """User-defined codecs, scales per head, and three bits."""
    policy = kvjax.CachePolicy(keys=codec, values=codec)
    wanted, _ = run(policy, "cpu", "reference", 64, (150, 1))
    found, _ = run(policy, platform, None, 64, (150, 1))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "platform"),
    [(Flat(), "tpu"), (Flat(), "gpu"), (Int3(), "tpu"), (Int3(), "gpu"),
     (Int4(group_size=1), "tpu"), (Int4("head"), "tpu")],
    ids=str,
)  # fmt: skip
def test_kernels_refuse_unsupported_codecs(codec, platform):
    policy = kvjax.CachePolicy(keys=codec, values=codec)
    with pytest.raises(ValueError, match=r"'pallas' (can't|needs)"):
        run(policy, platform, "pallas", 64, (70,))


@pytest.mark.rare
def test_small_weights_times_small_scales_in_float16():
    """Their products underflow in 16 bits."""
    codec = Float8("e5m2")
    policy, settings = kvjax.CachePolicy(keys=codec, values=codec), (("scale", 0.01),)
    found, _ = run(policy, "tpu", "pallas", 128, (300, 1), "float16", settings)
    wanted, _ = run(policy, "cpu", "reference", 128, (300, 1), "float16", settings)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3 * np.abs(b).max())


def test_gradients_with_the_kernel():
    """The gradients are those of the path ``blocks``."""
    config = tiny_config(num_hidden_layers=1, windows=(None,), head_dim=64)
    given = [jnp.asarray(np.random.default_rng(n).normal(size=(2, h, 5, 64)), "float32")
             for n, h in enumerate((HEADS, KV, KV))]  # fmt: skip

    def mixed(queries, keys, values, path, platform):
        with tracing_for(TARGETS[platform]):
            cache = kvjax.init_cache(config, batch=2, max_len=64)
        cache = kvjax.append(cache, 0, keys, values)
        return jnp.sum(jnp.sin(kvjax.attend(queries, cache, 0, path=path)))

    find = jax.jit(jax.grad(mixed, argnums=(0, 1, 2)), static_argnums=(3, 4))
    for a, b in zip(find(*given, "pallas", "tpu"), find(*given, None, "cpu"), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
