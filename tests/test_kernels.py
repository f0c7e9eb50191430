"""Attention paths against the reference, for every layout and codec that they support."""

import contextlib
import functools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import blocks
from kvjax.attention.paths import default_paths
from kvjax.codecs import Raw
from kvjax.core.compat import has_triton
from kvjax.core.pytree import tree_bytes
from kvjax.core.target import Target
from kvjax.layouts import Dense
from tests.copies import assert_no_copy
from tests.matrix import BLOCK, CODECS, LAYOUTS, tiny_config

HEADS, KV, DIM = 4, 2, 16
CALLS = ("jit", "pjit")
LENGTHS = (0, 9, 61)
"""Tokens in the rows before the tested call."""


def random(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def filled(policy, lengths=LENGTHS, max_len=80, kv=KV, dim=DIM, dtype="float32", spoil=True):
    """A cache of one layer with these tokens per row. Empty raw slots hold NaN."""
    config = tiny_config(
        num_hidden_layers=1, windows=(None,), num_key_value_heads=kv, head_dim=dim, dtype=dtype
    )
    cache = kvjax.init_cache(config, policy, batch=len(lengths), max_len=max_len)
    room = cache.layers[0].policy.layout.chunk or max(lengths) or 1
    step = APPEND
    for start in range(0, max(lengths), room):
        shape = (len(lengths), kv, room, dim)
        count = jnp.clip(jnp.asarray(lengths) - start, 0, room)
        cache = step(cache, random(*shape, seed=start), random(*shape, seed=start + 1), count)
    layer = cache.layers[0]
    if layer.tail is not None or not spoil:
        return cache
    if layer.policy.page_group is not None:
        return spoilt_pages(cache)
    layout = layer.policy.layout
    positions = jax.jit(layout.positions)(
        cache.length, cache.written[:, 0], np.arange(layout.slots)
    )
    empty = np.asarray(positions) < 0

    @jax.jit
    def spoilt(keys, values):
        both = (layer.policy.keys, keys), (layer.policy.values, values)
        return [
            codec.encode(jnp.where(empty[:, None, :, None], jnp.nan, codec.decode(store)))
            for codec, store in both
        ]

    keys, values = spoilt(layer.keys, layer.values)
    return replace(cache, layers=(replace(layer, keys=keys, values=values),))


def spoilt_pages(cache):
    """The same cache with NaN in every empty slot of every page, including free pages."""
    layer, pool = cache.layers[0], cache.pools[0]
    page = layer.policy.layout.page_size
    taken = np.zeros((pool.pages, page), bool)
    *_, positions = kvjax.read(cache, 0)
    rows, slots = np.nonzero(np.asarray(positions) >= 0)
    taken[np.asarray(pool.table)[rows, slots // page], slots % page] = True
    codecs = (layer.policy.keys, layer.keys), (layer.policy.values, layer.values)
    keys, values = (
        codec.encode(jnp.where(taken[:, None, :, None], codec.decode(store), jnp.nan))
        for codec, store in codecs
    )
    return replace(cache, layers=(replace(layer, keys=keys, values=values),))


def append(cache, keys, values, lengths):
    cache = kvjax.append(cache, 0, keys, values, lengths=lengths)
    return kvjax.advance(cache, keys.shape[2], lengths=lengths)


APPEND = jax.jit(append)


def both(path, cache, new=1, heads=HEADS, **settings) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of a path and of the reference for one more call, in which some rows take fewer
    tokens."""
    layer = cache.layers[0]
    shape = (cache.batch, layer.kv_heads, new, layer.head_dim)
    dtype = layer.policy.keys.dtype
    lengths = jnp.asarray([new] * (cache.batch - 1) + [max(new - 1, 1)])
    queries = random(cache.batch, heads, new, layer.head_dim, seed=5, dtype=dtype)

    @functools.partial(jax.jit, static_argnames="path")
    def call(cache, keys, values, path):
        cache = kvjax.append(cache, 0, keys, values, lengths=lengths)
        return kvjax.attend(queries, cache, 0, lengths=lengths, path=path, **settings)

    given = random(*shape, seed=3, dtype=dtype), random(*shape, seed=4, dtype=dtype)
    found, wanted = (np.asarray(call(cache, *given, p), np.float32) for p in (path, "reference"))
    real = np.arange(new) < np.asarray(lengths)[:, None]
    return found[real[:, None].repeat(heads, 1)], wanted[real[:, None].repeat(heads, 1)]


def agree(path, cache, tolerance=1e-5, **settings):
    found, wanted = both(path, cache, **settings)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


SETTINGS: list[dict[str, Any]] = [
    {}, {"window": 7}, {"window": 20, "sinks": 3}, {"chunk": 16}, {"soft_cap": 2.0, "scale": 0.7},
]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 200, 256, 5000, 131072, 2**20])
def test_sizes_of_buckets(tokens):
    sizes = blocks.bucket_sizes([1, tokens])
    assert len(sizes) <= 8 and sizes == sorted({*sizes}) and sizes[-1] == tokens
    assert sizes[0] == tokens or all(b <= 2 * a for a, b in pairwise(sizes))


def test_one_switch_of_at_most_eight_branches_serves_all_lengths():
    """One ``switch`` in the step chooses the bucket. Slots after it are not read."""
    cache = filled(kvjax.policy("static"), (3, 9), max_len=4096)
    queries = random(2, HEADS, 1, DIM)

    @jax.jit
    def call(cache):
        return kvjax.attend(queries, cache, 0, causal=False, path="buckets")

    def equations(program):
        """The equations of a jaxpr, and of the jaxprs that it calls."""
        for equation in program.eqns:
            inner = equation.params.get("jaxpr") if equation.primitive.name in CALLS else None
            yield from [equation] if inner is None else equations(inner)

    found = equations(jax.make_jaxpr(call)(cache))
    switches = [e for e in found if e.primitive.name == "cond"]
    assert [len(e.params["branches"]) for e in switches] == [5]  # 256, 512, ... 4096
    for length in (1, 256, 257, 2000, 4096):
        moved = replace(cache, length=jnp.full_like(cache.length, length))
        wanted = kvjax.attend(queries, moved, 0, causal=False, path="reference")
        np.testing.assert_allclose(call(moved), wanted, atol=1e-5)
    assert call._cache_size() == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_keep_the_copy_law(dtype):
    """Chunks are slices, which a CPU copies. No temporary is as large as half a layer."""
    config = tiny_config(num_hidden_layers=1, windows=(None,), head_dim=DIM, dtype=dtype)
    one = jax.ShapeDtypeStruct((2, 2, 1, DIM), dtype)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, new, queries):
        cache = kvjax.append(cache, 0, new, new)
        return kvjax.attend(queries, cache, 0, path="buckets"), kvjax.advance(cache, 1)

    temporary = []
    for size in (16384, 65536):
        make = functools.partial(kvjax.init_cache, config, batch=2, max_len=size)
        cache = jax.eval_shape(make)
        program = step.lower(cache, one, jax.ShapeDtypeStruct((2, 4, 1, DIM), dtype)).compile()
        held = tree_bytes(cache.layers)
        assert_no_copy(program, held, held)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[1] - temporary[0] < 4096  # a few bytes a branch


KERNELS = {
    "dense-raw": ("dense", "raw"),
    "ring-raw": ("ring", "raw"),
    "sinks-raw": ("sinks", "raw"),
    "dense-int8": ("dense", "int8"),
    "sinks-int4": ("sinks", "int4"),
    "dense-float8": ("dense", "float8"),
    "ring-float8-wide": ("ring", "float8-wide"),
    "dense-int4-tensor": ("dense", "int4-tensor"),
    "ring-int2": ("ring", "int2"),
    "dense-rotated": ("dense", "rotated"),
    "dense-rotated-centered": ("dense", "rotated-centered"),
    "paged-raw": ("paged", "raw"),
    "paged-int4": ("paged", "int4"),
}


by_triton = pytest.mark.skipif(
    not has_triton(), reason="JAX 0.12 has the Mosaic kernel for GPUs: see test_gpu.py"
)


@pytest.mark.slow(but=("dense-raw",))
@by_triton
@pytest.mark.parametrize("case", KERNELS)
def test_kernel(case):
    layout, name = KERNELS[case]
    codec = CODECS.get(name, Raw())
    agree("pallas", filled(kvjax.CachePolicy(LAYOUTS[layout][0], codec, codec, block=BLOCK)))


@pytest.mark.parametrize(
    "settings", [{"window": 7}, {"window": 20, "sinks": 3}, {"soft_cap": 2.0}], ids=str
)
def test_kernel_and_settings(settings):
    agree("pallas", filled(kvjax.policy("static")), new=5, **settings)


@pytest.mark.slow(but=("dense-raw", "ring-raw"))
@by_triton
@pytest.mark.parametrize(("layout", "name"), [("dense", "raw"), ("dense", "int4"), ("ring", "raw")])
def test_kernel_and_many_queries(layout, name):
    """More rows than a program takes: several blocks, the last one not full."""
    codec = CODECS.get(name, Raw())
    policy = kvjax.CachePolicy(LAYOUTS[layout][0], codec, codec, block=BLOCK)
    room = 40 if layout == "dense" else 12
    agree("pallas", filled(policy, max_len=120), new=room, heads=8 * HEADS // 4)


@pytest.mark.parametrize("heads", [2, 8])
def test_kernel_and_groups_in_16_bits(heads):
    cache = filled(kvjax.policy("static", dtype="bfloat16"), dtype="bfloat16")
    agree("pallas", cache, 2e-2, heads=heads)


@pytest.mark.parametrize(
    ("path", "policy", "settings", "reason"),
    [
        ("pallas", {}, {"bias": lambda q, k: jnp.zeros(())}, "'pallas' does not support a bias"),
        pytest.param(
            "pallas", {"keys": CODECS["centered"]}, {}, "'pallas' can't decode", marks=by_triton
        ),
        ("pallas", {"placement": kvjax.Host()}, {}, "'pallas' can't read host memory"),
        ("fast", {}, {}, "unknown attention path 'fast': choose from blocks, reference, buckets"),
    ],
)
def test_refused(path, policy, settings, reason):
    cache = filled(kvjax.CachePolicy(Dense(), block=BLOCK, **policy), (0, 0))
    with pytest.raises(ValueError, match=reason):
        both(path, cache, **settings)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ((Target("cpu"), False, 1), ["blocks"]),
        ((Target("gpu", (8, 0)), False, 1), ["pallas", "buckets"]),
        ((Target("gpu", (12, 0)), False, 33), ["pallas", "blocks"]),
        ((Target("gpu", (8, 0)), True, 1), ["blocks"]),
        ((Target("gpu", (7, 5)), False, 1), ["buckets"]),
        ((Target("gpu", (7, 5)), False, 33), ["blocks"]),
        ((Target("tpu"), False, 512), ["pallas", "blocks"]),
        ((Target("tpu"), True, 1), ["blocks"]),
    ],
)
def test_the_table(call, path):
    assert [*default_paths(*call)] == path


def a_gpu():
    """The option that names the GPU to compile for. JAX needs it since 0.11."""
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    try:
        device = jax.sharding.AbstractDevice("NVIDIA H100", 132, platform="gpu")
    except TypeError:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def lowered(path, name, platform, new=1, dim=64, dtype="bfloat16", **settings):
    """The lowered program of a call for another platform, as text, without its compiler."""
    codec = CODECS.get(name, Raw())
    codec = codec.resolve(dtype, platform)
    policy = kvjax.CachePolicy(Dense(), codec, codec)
    config = tiny_config(num_hidden_layers=1, windows=(None,), head_dim=dim, dtype=dtype)
    queries = jax.ShapeDtypeStruct((2, 8, new, dim), dtype)

    def appended(queries):
        cache = kvjax.init_cache(config, policy, batch=2, max_len=1024)
        return kvjax.append(cache, 0, queries[:, :2], queries[:, 2:4])

    cache = jax.eval_shape(appended, queries)

    def call(cache, queries):
        return kvjax.attend(queries, cache, 0, path=path, **settings)

    with a_gpu() if platform == "cuda" else contextlib.nullcontext():
        traced = jax.jit(call).trace(cache, queries)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@by_triton
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["raw", "int8", "int4", "float8", "int8-head"])
@pytest.mark.parametrize("new", [1, 4])
def test_the_kernel_lowers_for_a_gpu(name, new):
    assert "triton" in lowered("pallas", name, "cuda", new, soft_cap=30.0)


@pytest.mark.parametrize("name", ["raw", "int4", "rotated"])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_buckets_lower_for_accelerators(name, platform):
    text = lowered("buckets", name, platform)
    assert text.count("stablehlo.case") == 1
