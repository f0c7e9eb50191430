"""Cells of the copy law, compiled for devices that are not here: one layer of a cache."""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import SingleDeviceSharding

import kvjax
from kvjax.attention import blocks
from kvjax.attention.paths import kernels_for
from kvjax.cache.sizes import abstract_arguments, array_shardings, shard_of
from kvjax.codecs import Float8, Int4, Rotated
from kvjax.core.compat import jax_0_8_compiler_options, jax_0_8_program_text
from kvjax.core.pytree import tree_bytes
from kvjax.core.target import target_of
from kvjax.core.topology import compiling_for, resolve_device_or_mesh
from kvjax.layouts import Growing, Ring
from kvjax.memory.hlo import Collective, collectives, large_results
from kvjax.memory.shapes import ModelShape
from kvjax.memory.sizes import prefetch_bytes

STEP, LOOP, CHUNK, SCAN = "step", "while_loop", "512 tokens", "scan over layers"
NEW = {STEP: 1, LOOP: 1, CHUNK: 512, SCAN: 1}
"""Tokens a row of a call of each form."""


@dataclass(frozen=True)
class Cell:
    """A layer, and a call: ``policy`` of the cache, ``form`` of the program, ``max_len`` slots,
    rows, heads of queries and of keys, channels. ``layers``: more than one, where bodies are
    fetched ahead; ``windows`` of the layers, where they have some; ``path``: of attention, by
    default the table's; ``new``: tokens of a row's call, where they are not those of its form;
    ``stacked``: layers that are alike in one, and a scan over them."""

    policy: Any
    form: str = STEP
    max_len: int = 8192
    batch: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 1
    dtype: str = "bfloat16"
    windows: tuple[int | None, ...] | None = None
    path: str | None = None
    new: int | None = None
    stacked: bool = False

    @property
    def config(self) -> ModelShape:
        """The model of that shape."""
        hidden = self.heads * self.head_dim
        shape = self.layers, hidden, 4 * hidden, self.heads, self.kv_heads, self.head_dim, 256
        return ModelShape(*shape, dtype=self.dtype, windows=self.windows)


@dataclass(frozen=True)
class Found:
    """What a compiler says of a cell: bytes of the cache, by place, of what is aliased on device
    and on the host, of temporaries there, of the queries, and of layers that are fetched ahead;
    results as large as half of a layer's body; what devices exchange; and, where no kernel is
    compiled, of the scores and weights of a piece of the text. On a mesh all is of one device."""

    cache: dict[str, int]
    aliased: int
    temporaries: int
    host_aliased: int
    host_temporaries: int
    queries: int
    ahead: int = 0
    large: list[str] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    text: str = field(default="", repr=False)
    program: Any = field(default=None, repr=False)
    pieces: int = 0

    @property
    def whole(self) -> bool:
        """Whether the donated cache is updated where it stands."""
        return self.aliased + self.host_aliased >= sum(self.cache.values())


SMALL: dict[str, dict[str, int]] = {
    "1,024 of a row": {"max_len": 1024, "batch": 1, "heads": 4, "kv_heads": 2}
}
"""For trial runs where they run."""


SHARE, LONG = 0.02, 8
"""Of the cache, what temporaries of a step may take; and how often the queries, of 512 tokens."""
PROGRAMS, BASE = 256, 2**20
"""What temporaries may take in any case: of a kernel's programs what each finds, and a megabyte."""
_TWICE = "rotated", "4 bits", "4 and 2 bits", "2 bits", "pages of 4 bits"
BLOCKS: dict[str, int] = dict.fromkeys((*_TWICE, "host", "host 1 ahead", "host 4 bits"), 4)
BLOCKS |= dict.fromkeys(("8 bits", "float8", "pages of 8 bits"), 2)
"""And how many blocks of every row as float32: keys and values while they are encoded, twice where
a rotation mixes them; or while they are fetched from the host."""


def constant(cell: Cell, policy: str) -> int:
    """Bytes that temporaries of a step may take however small the cache is; they do not grow with
    its capacity."""
    heads = cell.batch * cell.kv_heads
    block = heads * 64 * cell.head_dim * 4
    partial = max(PROGRAMS, heads) * (cell.heads // cell.kv_heads) * (cell.head_dim + 2) * 4
    return BLOCKS.get(policy, 0) * block + partial + BASE


def limit(found: Found, form: str) -> int:
    """Bytes that temporaries may take."""
    most = LONG * found.queries if form == CHUNK else int(SHARE * sum(found.cache.values()))
    return most + found.ahead


def obeys(found: Found, cell: Cell, policy: str) -> bool:
    """Whether the copy law holds: the cache is updated where it stands, nothing of half a layer is
    made, but what is fetched ahead, and temporaries are few."""
    long, most = cell.form == CHUNK, limit(found, cell.form)
    if not long:
        most = max(most, constant(cell, policy) + found.ahead + found.pieces)
    # What is fetched, and zeros in its place where nothing would be.
    fetched = ("copy-start", "broadcast") if found.ahead else ()
    made = [x for x in found.large if not x.startswith(fetched)]
    # Results as large as the queries of 512 tokens are theirs.
    few = found.temporaries <= most and not found.host_temporaries
    return found.whole and few and (long or not made)


def cell_of(policy: str, feature: str, form: str) -> Cell:
    """The cell of these names."""
    shape: dict[str, Any] = (FEATURES | SMALL)[feature]
    layers = LAYERS.get(policy, {})
    if form != SCAN:
        return Cell(POLICIES[policy], form, **shape, **layers)
    windows = 2 * layers["windows"] if "windows" in layers else None
    return Cell(POLICIES[policy], form, **shape, layers=4, windows=windows, stacked=True)


def compiled(cell: Cell, device: Any) -> Found:
    """Compile a cell's program for a device, its name, or a mesh of some."""
    device, mesh = resolve_device_or_mesh(device)
    new = cell.new or NEW[cell.form]
    with compiling_for(device):
        make = functools.partial(
            kvjax.init_cache, cell.config, cell.policy, batch=cell.batch, max_len=cell.max_len,
            mesh=mesh, stacked=cell.stacked,
        )  # fmt: skip
        cache = jax.eval_shape(make)
        there, spread = array_shardings(cache, device), cache.mesh_sharding
        near: Any = [SingleDeviceSharding(device)] * 2
        if spread is not None:
            of_queries = spread.query_spec(cell.heads, cell.kv_heads)
            near = [spread.sharding(of_queries), spread.sharding(spread.token_spec())]
        queries, keys = (
            jax.ShapeDtypeStruct((cell.batch, heads, new, cell.head_dim), cell.dtype)
            for heads in (cell.heads, cell.kv_heads)
        )
        program = jax.jit(
            functools.partial(_PROGRAMS[cell.form], path=cell.path), donate_argnums=2,
            in_shardings=(*near, there), out_shardings=(near[0], there),
        )  # fmt: skip
        found = program.lower(queries, keys, abstract_arguments(cache, there)).compile(
            jax_0_8_compiler_options(device)
        )
    memory: Any = found.memory_analysis()
    text = jax_0_8_program_text(found)
    layers = [x if spread is None else shard_of(x, spread) for x in cache.layers]
    body = min(tree_bytes((layer.keys, layer.values)) // (layer.stack or 1) for layer in layers)
    size = math.prod(near[0].shard_shape(queries.shape)) * queries.dtype.itemsize
    return Found(
        kvjax.nbytes(cache, spread),
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.host_alias_size_in_bytes,
        memory.host_temp_size_in_bytes,
        size,
        prefetch_bytes(cache, spread),
        large_results(text, body // 2),
        collectives(text, 1 if mesh is None else mesh.size),
        text,
        found,
        0 if kernels_for(target_of(device)) else 2 * cell.batch * cell.heads * blocks.CHUNK * 4,
    )


TRITON = "jax.experimental.pallas.triton", "jax._src.pallas.triton"
"""Modules that JAX will remove."""


def as_later(without: Sequence[str] = ()) -> None:
    """Make this process like one with a later JAX: ``DeprecationWarning`` is an error, and the
    modules that it is ``without`` can't be imported."""
    warnings.simplefilter("error", DeprecationWarning)
    modules: Any = sys.modules
    modules.update(dict.fromkeys(without))


def law_of(
    device: str, cells: Sequence[tuple[str, str, str]], without: Sequence[str] = ()
) -> list[tuple[Any, bool, dict[str, Any]]]:
    """Some cells, by their names; whether each obeys, and its figures. For a process of its own:
    modules that it is ``without`` can't be imported there, and JAX's warnings that something will
    be removed are errors."""
    as_later(without)
    results = []
    for name in cells:
        cell = cell_of(*name)
        found = compiled(cell, device)
        figures = {k: v for k, v in vars(found).items() if k not in ("text", "program")}
        results.append((name, obeys(found, cell, name[0]), figures))
    return results


def pages_changed(
    change: Callable[..., Any], policy: Any, device: Any
) -> tuple[int, int, int, int, list[str]]:
    """Compile what is done with a cache in pages, or with what is kept of one: ``change(cache)``.

    Returns:
      Bytes of its pages, of one page, of what is aliased, of temporaries; and what is made that is
      half as large as the pages of keys, or of values.
    """
    device, _ = resolve_device_or_mesh(device)
    cell = Cell(policy)
    with compiling_for(device):
        make = functools.partial(kvjax.init_cache, cell.config, policy, batch=cell.batch)
        cache = jax.eval_shape(functools.partial(make, max_len=cell.max_len))
        there, found = array_shardings(cache, device), jax.eval_shape(change, cache)
        after = (
            array_shardings(found, device) if isinstance(found, kvjax.KVCache)
            else jax.tree.map(lambda _: SingleDeviceSharding(device), found)
        )  # fmt: skip
        jitted = jax.jit(change, donate_argnums=0, in_shardings=(there,), out_shardings=after)
        lowered = jitted.lower(abstract_arguments(cache, there))
        program = lowered.compile(jax_0_8_compiler_options(device))
    memory: Any = program.memory_analysis()
    bodies = [(layer.keys, layer.values) for layer in cache.layers]
    small = min(tree_bytes(x) for body in bodies for x in body)
    return (
        tree_bytes(bodies), tree_bytes(bodies) // policy.full.layout.pages,
        memory.alias_size_in_bytes, memory.temp_size_in_bytes,
        large_results(jax_0_8_program_text(program), small // 2),
    )  # fmt: skip


def _step(queries: Any, keys: Any, cache: Any, path: str | None = None) -> Any:
    for layer in range(len(cache.layers)):
        cache = kvjax.append(cache, layer, keys, keys)
        queries = kvjax.attend(queries, cache, layer, path=path)
        keys = _next(keys, queries)
    return queries, kvjax.advance(cache, keys.shape[2])


def _next(keys: Any, queries: Any) -> Any:
    """Keys that go by what attention gave: of each head by the first of its queries', and by so
    little that they stay finite."""
    batch, heads, new, head_dim = keys.shape
    return keys + queries.reshape(batch, heads, -1, new, head_dim)[:, :, 0] / 4


def _loop(queries: Any, keys: Any, cache: Any, path: str | None = None) -> Any:
    def go_on(carry: Any) -> Any:
        return jnp.all(carry[1].length < carry[2])

    def one(carry: Any) -> Any:
        queries, cache, stop = carry
        return *_step(queries, _next(keys, queries), cache, path), stop

    return lax.while_loop(go_on, one, (queries, cache, cache.length[0] + 100))[:2]


def _scan(queries: Any, keys: Any, cache: Any, path: str | None = None) -> Any:
    """A loop of steps, each a scan over the layers of all stacks, as many of each."""
    stacks = range(len(cache.layers))

    def one(carry: Any, number: Any) -> Any:
        queries, keys, call = carry
        for stack in stacks:
            queries, call = call.attend((stack, number), queries, keys, keys, path=path)
            keys = _next(keys, queries)
        return (queries, keys, call), None

    def step(carry: Any) -> Any:
        queries, cache, stop = carry
        call = kvjax.step(cache, keys.shape[2])
        carry = queries, _next(keys, queries), call
        (queries, _, call), _ = lax.scan(one, carry, jnp.arange(cache.layers[0].stack))
        return queries, call.done(), stop

    def go_on(carry: Any) -> Any:
        return jnp.all(carry[1].length < carry[2])

    return lax.while_loop(go_on, step, (queries, cache, cache.length[0] + 100))[:2]


_PROGRAMS: dict[str, Callable[..., Any]] = {
    STEP: _step, LOOP: _loop, CHUNK: _step, SCAN: _scan,
}  # fmt: skip

_SINKS = Ring(1024, sinks=4, slack=511)
POLICIES: dict[str, Any] = {
    "raw": kvjax.policy("static"),
    "growing": kvjax.CachePolicy(Growing(8192)),
    "sinks": kvjax.CachePolicy(_SINKS),
    "hybrid": kvjax.policy("hybrid", slack=511),
    "8 bits": kvjax.policy(bits=8),
    "4 bits": kvjax.policy(bits=4),
    "4 and 2 bits": kvjax.policy(key_bits=4, value_bits=2),
    "2 bits": kvjax.policy(bits=2),
    "float8": kvjax.CachePolicy(keys=Float8(), values=Float8()),
    "rotated": kvjax.CachePolicy(
        keys=Rotated(Int4()), values=Rotated(Int4())
    ),
    "pages": kvjax.policy("paged"),
    "pages of 8 bits": kvjax.policy("paged", bits=8),
    "pages of 4 bits": kvjax.policy("paged", bits=4),
    "pages and windows": kvjax.policy("paged", slack=511),
    "host": replace(kvjax.policy("offloaded_static"), placement=kvjax.Host()),
    "host 1 ahead": replace(kvjax.policy("offloaded_static"), placement=kvjax.Host(prefetch=1)),
    "host 4 bits": kvjax.policy("offloaded_static", bits=4),
}  # fmt: skip
"""What the law is shown for, by name."""

LAYERS: dict[str, dict[str, Any]] = {
    "hybrid": {"layers": 2, "windows": (1024, None)},
    "pages and windows": {"layers": 2, "windows": (1024, None)},
    "host 1 ahead": {"layers": 3},
}
"""Policies whose cells have more than one layer: how many, and their windows."""

FEATURES: dict[str, dict[str, int]] = {
    "8,192": {},
    "32,768": {"max_len": 32768},
    "8,001 slots": {"max_len": 8001},
    "one head of keys": {"kv_heads": 1},
    "as many as queries'": {"kv_heads": 32},
    "64 channels": {"head_dim": 64},
    "256 channels": {"head_dim": 256},
}
"""Shapes beside the usual one: eight rows, 32 heads of queries, 8 of keys, 128 channels."""
