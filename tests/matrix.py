"""The law matrix: every part that the laws are tested on. A new part joins by a line here.

The laws' cells are chosen by ``tests/covering.py``. Every part is in one of the cells that the
README's command runs, and every pair of parts, of the kinds that ``CACHE_PAIRS`` and its like name,
in one of those that ``.ci/run`` runs. Of all other cells of the product, a run with
``KVJAX_SHARD=k/n`` has one share, and nothing else, and a run with ``KVJAX_FULL=1`` has all.
"""

import functools
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.codecs import (
    Centered,
    Codebook,
    Float8,
    HalfQuadratic,
    Int1,
    Int2,
    Int3,
    Int4,
    Int8,
    MixedPrecision,
    Raw,
    Rotated,
    Unrotated,
)
from kvjax.layouts import UNLIMITED, Dense, Growing, Paged, Ring
from kvjax.models.architecture import Architecture
from kvjax.models.config import LlamaConfig, RopeConfig
from tests import covering, naive

FULL = os.environ.get("KVJAX_FULL") == "1"
"""Whether every cell is asked for."""
SHARD = os.environ.get("KVJAX_SHARD")
"""``k/n``: one share alone of the cells that are not in the covering sets."""

CODECS: dict[str, Any] = {
    "int8": Int8(),
    "int4": Int4("channel", zero_point=True),
    "int3": Int3("token", 4),
    "int2": Int2("channel", zero_point=True),
    "int1": Int1(zero_point=True),
    "int8-head": Int8("head", zero_point=True),
    "int4-tensor": Int4("tensor"),
    "float8": Float8(),
    "float8-wide": Float8("e5m2", "channel"),
    "half-quadratic": HalfQuadratic(Int4(zero_point=True)),
    "rotated-centered": Rotated(Centered(Codebook(2))),
    "mixed": MixedPrecision(Int2("channel", zero_point=True)),
    "rotated": Rotated(Int4()),
    "unrotated": Unrotated(Int8("channel")),
    "centered": Centered(Rotated(Int4())),
    "unrotated-centered": Unrotated(Centered(Int4())),
}
"""Every codec of blocks, and wrappings of wrappings."""

RAW: dict[str, Any] = {name: Raw(name) for name in ("float32", "bfloat16", "float16")}
"""Numbers that stand alone."""

BLOCK = 8
"""Tokens of a block, in the cells: small, so that short texts have many."""

LAYOUTS: dict[str, tuple[Any, Any]] = {
    "dense": (Dense(), (None, 0)),
    "growing": (Growing(), (None, 0)),
    "ring": (Ring(20, slack=15), (20, 0)),
    "narrow": (Ring(5, slack=15), (5, 0)),
    "sinks": (Ring(19, sinks=3, slack=17), (19, 3)),
    "paged": (Paged(16), (None, 0)),
    "paged-sinks": (Paged(24, Ring(19, sinks=3, slack=17)), (19, 3)),
}
"""Layouts, and the window and the sinks that they leave to be seen."""

PLACEMENTS: dict[str, Any] = {
    "device": kvjax.Device(),
    "host": kvjax.Host(),
    "host-1": kvjax.Host(1),
    "host-2": kvjax.Host(2),
}

MESHES = {"8-1-1": (8, 1, 1), "1-8-1": (1, 8, 1), "1-1-8": (1, 1, 8), "2-2-2": (2, 2, 2)}
"""Devices along data, tensor and sequence."""

REFUSED = {
    (layout, mesh) for layout in LAYOUTS for mesh, axes in MESHES.items()
    if layout.startswith("paged") and axes[2] > 1
}  # fmt: skip
"""What can't be had."""

HEADS = {"multi-head": 8, "grouped": 2, "multi-query": 1}
"""Key-value heads of a model with 8 heads of queries."""

FORMS = ("step", "while_loop", "scan", "chunk")
"""Of programs that may not copy a cache: see ``tests/test_copies.py``."""


class Operation(NamedTuple):
    """What is done with a cache of three rows: the rows of the old one that the new rows go on
    from, and how many tokens each of them has forgotten, None for all."""

    change: Callable[[Any], Any]
    rows: tuple[int, ...] = (0, 1, 2)
    back: tuple[int | None, ...] = (0, 0, 0)


@functools.partial(jax.jit, static_argnums=0)
def _jitted(change: Callable[[Any], Any], cache: Any) -> Any:
    return change(cache)


def _inside(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Inside ``jit``, one program for all its steps."""
    return functools.partial(_jitted, change)


def _forked(cache: Any) -> Any:
    other = kvjax.fork(cache)
    jax.tree.map(lambda leaf: leaf.delete(), cache)
    return other


def _to_and_fro(cache: Any) -> Any:
    """Every layer to another place, and back."""
    there = cache.layers[0].policy.placement
    other = kvjax.Device() if there.place == "host" else kvjax.Host()
    return kvjax.migrate(kvjax.migrate(kvjax.fork(cache), other), there)


def _converted(cache: Any) -> Any:
    """To the policies that it has."""
    count = len(cache.stacks or cache.layers)
    policies = [cache.layer(number).policy for number in range(count)]
    most = None if cache.max_len >= UNLIMITED else cache.max_len
    return kvjax.convert(cache, policies, max_len=most)


OPERATIONS: dict[str, Operation] = {
    "select": Operation(_inside(lambda c: kvjax.select(c, [2, 0, 0])), (2, 0, 0)),
    "reset": Operation(
        _inside(lambda c: kvjax.reset(c, np.array([True, False, False]))), back=(None, 0, 0)
    ),
    "fork": Operation(_forked),
    "repeat": Operation(
        _inside(lambda c: kvjax.select(kvjax.repeat(c, 2), [5, 0, 3])), (2, 0, 1)
    ),
    "rewind": Operation(
        _inside(lambda c: kvjax.rewind(c, np.array([7, 3, 1]))), back=(7, 3, 1)
    ),
    "migrate": Operation(_to_and_fro),
    "concatenate": Operation(
        _inside(lambda c: kvjax.select(kvjax.concatenate([c, c]), [1, 5, 3])), (1, 2, 0)
    ),
    "convert": Operation(_inside(_converted)),
    "grow": Operation(lambda c: kvjax.grow(kvjax.fork(c), 2 * c.max_len)),
}  # fmt: skip
"""Operations of one cache. ``grow`` is for what can grow."""


def teams() -> list[tuple[str, ...]]:
    """Codecs of a layer: of its keys, and of its values. Every codec of blocks is once of the one
    and once of the other; numbers that stand alone go with their like."""
    names = list(CODECS)
    return [*((name,) for name in RAW), *zip(names, [*names[1:], names[0]], strict=True)]


class CacheCell(NamedTuple):
    """A cache of one layer, its codecs those of a team; what is done with it, one after the other,
    whether it is filled token by token as well (a program more), how long a text can be, and
    whether it is the first of two layers in a stack."""

    codecs: tuple[str, ...]
    layout: str
    placement: str
    operations: tuple[str, ...]
    singly: bool
    max_len: int
    stacked: bool = False

    @property
    def made_by(self) -> tuple[Any, ...]:
        """What its cache goes by."""
        return self.codecs, self.layout, self.placement, self.max_len, self.stacked

    @property
    def id(self) -> str:
        stacked = ("stacked",) * self.stacked
        return "-".join((self.layout, *self.codecs, self.placement, *stacked))


class MeshCell(NamedTuple):
    """A cache of one layer on a mesh."""

    codecs: tuple[str, ...]
    layout: str
    mesh: str
    heads: str
    placement: str

    @property
    def id(self) -> str:
        return "-".join((self.layout, *self.codecs, self.mesh, self.heads, self.placement))


class CopyCell(NamedTuple):
    """A compiled program that may not copy its cache."""

    codecs: tuple[str, ...]
    layout: str
    form: str

    @property
    def id(self) -> str:
        return "-".join((self.form, self.layout, *self.codecs))


CACHE_PAIRS = (
    ("codecs", "layout"), ("layout", "placement"), ("codecs", "placement"),
    ("singly", "layout"), ("singly", "codecs"),
    ("stacked", "codecs"), ("stacked", "layout"), ("stacked", "placement"),
)  # fmt: skip
OPERATION_PAIRS = (
    ("operations", "layout"), ("operations", "codecs"), ("operations", "placement"),
    ("layout", "placement"), ("operations", "stacked"),
)  # fmt: skip
MESH_PAIRS = (("layout", "mesh"), ("mesh", "heads"), ("codecs", "codecs"), ("mesh", "placement"))
PATH_PAIRS = (("codecs", "codecs"), ("layout", "layout"))
COPY_PAIRS = (("form", "layout"), ("form", "codecs"))


class PathCell(NamedTuple):
    """A cache of one layer that another path of attention reads."""

    codecs: tuple[str, ...]
    layout: str

    @property
    def id(self) -> str:
        return "-".join((self.layout, *self.codecs))


def cache_cells() -> list[CacheCell]:
    """The product of teams, layouts and placements. A cell does a third of the operations, and one
    in four is filled token by token as well, in turns."""
    every = []
    sizes = len(teams()), len(LAYOUTS), len(PLACEMENTS)
    for at in itertools.product(*map(range, sizes)):
        team, layout, place = teams()[at[0]], [*LAYOUTS][at[1]], [*PLACEMENTS][at[2]]
        growing = LAYOUTS[layout][0].resolve(1024, None).grows_to is not None
        done = [name for name in OPERATIONS if growing or name != "grow"]
        third = tuple(done[sum(at) % 3 :: 3])
        max_len = 1024 if growing or sum(at) % 2 else 64
        cell = CacheCell(team, layout, place, third, sum(at) % 4 == 0, max_len)
        every += [cell, cell._replace(stacked=True)] if sum(at) % 3 == 0 else [cell]
    return every


def mesh_cells() -> list[MeshCell]:
    """The product of teams, layouts, meshes, heads, and the first two places; pages are refused
    where a sequence is divided."""
    parts = teams(), LAYOUTS, MESHES, HEADS, list(PLACEMENTS)[:2]
    every = itertools.starmap(MeshCell, itertools.product(*parts))
    return [cell for cell in every if (cell.layout, cell.mesh) not in REFUSED]


def copy_cells() -> list[CopyCell]:
    """The product of teams, layouts and forms."""
    return [*itertools.starmap(CopyCell, itertools.product(teams(), LAYOUTS, FORMS))]


def path_cells() -> list[PathCell]:
    """The product of teams and layouts."""
    return [*itertools.starmap(PathCell, itertools.product(teams(), LAYOUTS))]


_Cell = TypeVar("_Cell", CacheCell, MeshCell, CopyCell, PathCell)


def choice(every: Sequence[_Cell], kinds: Iterable[tuple[str, str]]) -> list[_Cell]:
    """The covering set of ``kinds``."""
    kinds = tuple(kinds)
    return covering.covering(every, lambda cell: covering.pairs_of(cell, kinds))


def smallest_set(some: Sequence[_Cell]) -> list[_Cell]:
    """The fewest of some cells, found greedily, that together have every part that any of them has:
    those that the README's command runs."""
    return choice(some, [(name, name) for name in some[0]._fields])


def cells(
    every: list[_Cell],
    kinds: Iterable[tuple[str, str]],
    among: Sequence[_Cell] = (),
    first: Sequence[_Cell] = (),
) -> list[Any]:
    """Parameters of a law: the covering set and the ``first`` cells, by default the smallest set,
    which alone are not slow, or what the environment asks for instead. They are chosen ``among``
    some of the cells, where these are given: laws that share what they make."""
    chosen = choice(among or every, kinds)
    first = first or smallest_set(among or chosen)
    chosen += [cell for cell in first if cell not in chosen]
    if SHARD:
        number, parts = map(int, SHARD.split("/"))
        chosen = covering.share(every, chosen, number, parts)
    elif FULL:
        chosen = every
    return [
        pytest.param(
            cell, id=cell.id, marks=[pytest.mark.cells, *[pytest.mark.slow] * (cell not in first)]
        )
        for cell in chosen
    ]


class PolicyCase(NamedTuple):
    """A policy of one layer, what its codec does to a number, how close its results come to the
    truth, the window and the sinks that it leaves to be seen, and what its tail does."""

    policy: Any
    store: Any = lambda x: x
    tolerance: float = 1e-5
    sight: tuple[int | None, int] = (None, 0)
    coded: naive.Coded | None = None


def policy_case(codecs: tuple[str, ...], layout: str, placement: str = "device") -> PolicyCase:
    """What the cells' names say; the codecs have 0, 1 and 2 recent blocks, and
    0 and 3 raw sinks, in turns."""
    made, sight = LAYOUTS[layout]
    place = PLACEMENTS[placement]
    if codecs[0] in RAW:
        raw, dtype = RAW[codecs[0]], codecs[0]
        policy = kvjax.CachePolicy(made, raw, raw, place, block=BLOCK)
        return PolicyCase(policy, rounded(dtype), 1e-5 if dtype == "float32" else 1e-3, sight)
    keys, values = (CODECS[name] for name in codecs)
    recent = [*CODECS].index(codecs[0]) % 3
    sinks = 3 * ([*CODECS].index(codecs[0]) % 2)
    policy = kvjax.CachePolicy(made, keys, values, place, BLOCK, recent, sinks=sinks)
    sinks *= sight[0] is None
    tail = naive.Coded(BLOCK, recent, codes(keys), codes(values), keys.before_rotary, sinks)
    return PolicyCase(policy, tolerance=1e-3, sight=sight, coded=tail)


def rounded(dtype: str) -> Any:
    """What a dtype does to a number."""
    return lambda x: np.asarray(x, jnp.dtype(dtype)).astype(np.float64)


@functools.cache
def codes(codec: Any) -> Any:
    """What a codec does to a block of float32 numbers [kv_heads, block, head_dim]."""
    codec = codec.resolve("float32", jax.default_backend())
    there_and_back = jax.jit(lambda x: codec.decode(codec.encode(x)))

    def coded(x: np.ndarray) -> np.ndarray:
        return np.asarray(there_and_back(np.asarray(x, np.float32)[None, :, None]))[0, :, 0]

    return coded


def tiny_config(**changes: Any) -> LlamaConfig:
    """A grouped-query decoder small enough for float64 numpy; one layer in two has a window."""
    settings: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "qkv_bias": False, "output_bias": False, "mlp_bias": False,
        "qk_norm": False, "rope": RopeConfig(), "windows": (None, 9), "dtype": "float32",
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def tiny_model(**changes: Any) -> tuple[Architecture, Any]:
    """An architecture, and parameters large enough that attention is not uniform."""
    model = Architecture(tiny_config(**changes))
    params = model.init_params(0)
    return model, jax.tree.map(lambda x: x if x.ndim == 1 else 8 * x, params)


def some(names: Iterable[str], *kept: str) -> list[Any]:
    """Names as parameters, all but those that are kept for the shards alone."""
    return [pytest.param(n, marks=[] if n in kept else pytest.mark.rare) for n in names]
