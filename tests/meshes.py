"""Meshes of simulated devices, and what a program for them says of its collectives."""

import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np

import kvjax
from tests.copies import _BYTES

SHAPES = {"8-1-1": (8, 1, 1), "1-8-1": (1, 8, 1), "1-1-8": (1, 1, 8), "2-2-2": (2, 2, 2)}
"""Devices along data, tensor and sequence."""


def mesh(name: str) -> Any:
    """A mesh by its name in ``SHAPES``."""
    data, tensor, sequence = SHAPES[name]
    return kvjax.make_mesh(data=data, tensor=tensor, sequence=sequence)


class Collective(NamedTuple):
    """A collective of a compiled program: its kind, and the bytes that a device has after it."""

    kind: str
    bytes: int


_KINDS = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
_LINE = re.compile(rf"= (?P<result>.*?) (?P<kind>{_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(compiled: Any) -> list[Collective]:
    """Those of a compiled program, each once, however often it runs."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := _LINE.search(line):
            sizes = [
                _BYTES[dtype] * int(np.prod([int(n) for n in shape.split(",") if n]))
                for dtype, shape in _ARRAY.findall(match["result"])
            ]
            found.append(Collective(match["kind"], sum(sizes)))
    return found


def counted(compiled: Any) -> Counter[str]:
    """How many there are of each kind."""
    return Counter(each.kind for each in collectives(compiled))


def abstract_cache(config: Any, policy: Any, batch: int, max_len: int, over: Any) -> Any:
    """An empty cache on a mesh, as shapes with their shardings."""
    cache = jax.eval_shape(
        lambda: kvjax.init_cache(config, policy, batch=batch, max_len=max_len, mesh=over)
    )
    spread = cache.spread

    def placed(x: Any, spec: Any, kind: str | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread.sharding(spec, kind))

    rows = [placed(x, spread.of_rows()) for x in (cache.length, cache.written, cache.status)]
    layers = tuple(jax.tree.map(placed, layer, layer.specs()) for layer in cache.layers)
    return kvjax.KVCache(
        layers, *rows, sources=cache.sources, positions=cache.positions,
        turned_for=cache.turned_for, budget=cache.budget,
    )  # fmt: skip


def abstract_params(model: Any, over: Any) -> Any:
    """A model's parameters on a mesh, as shapes with their shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model.abstract_params(), model.param_shardings(over),
    )  # fmt: skip
