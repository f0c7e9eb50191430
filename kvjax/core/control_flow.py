"""``lax``'s loops and branches, which inside a user's own ``jax.shard_map`` take what varies.

There JAX checks along which axes of the mesh each array varies from device to device
(``check_vma``), and wants what a loop carries, and what branches give, to vary along the same ones.
Zeros that a loop begins with vary along none: here they are cast to what the others do. Elsewhere
these functions are those of ``lax``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from kvjax.core.compat import jax_0_8_pcast, jax_0_10_varying

Axes = frozenset[str]


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *args: Any) -> Any:
    """``lax.cond``."""
    return lax.cond(pred, *_alike((true_fun, false_fun), *args), *args)


def switch(index: Any, branches: Sequence[Callable[..., Any]], *args: Any) -> Any:
    """``lax.switch``."""
    return lax.switch(index, _alike(branches, *args), *args)


def fori_loop(lower: Any, upper: Any, body: Callable[[Any, Any], Any], init: Any) -> Any:
    """``lax.fori_loop``, whose counter is an int32 with 64 bits enabled too."""
    lower, upper = (
        x.astype(jnp.int32) if isinstance(x, jax.Array) else np.int32(x) for x in (lower, upper)
    )
    body, init = _carried(body, init, before=(lower,))
    # Of a known number of turns ``lax`` makes a counter of its own.
    return lax.fori_loop(lower, upper, lambda turn, x: body(turn.astype(jnp.int32), x), init)


def while_loop(going: Callable[[Any], Any], body: Callable[[Any], Any], init: Any) -> Any:
    """``lax.while_loop``."""
    body, init = _carried(body, init)
    return lax.while_loop(going, body, init)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
) -> tuple[Any, Any]:
    """``lax.scan``."""
    if not _checked():
        return lax.scan(body, init, xs, length)
    one = jax.tree.map(lambda x: x[0], xs)
    init = _carried(lambda carry: body(carry, one)[0], init)[1]
    wanted = [_axes(x) for x in jax.tree.leaves(init)]

    def cast(carry: Any, x: Any) -> tuple[Any, Any]:
        after, y = body(carry, x)
        return _cast(after, wanted), y

    return lax.scan(cast, init, xs, length)


def match_varying(arrays: Sequence[Any]) -> tuple[list[Any], Axes]:
    """Arrays that all vary along the same axes, and these axes: for a kernel."""
    if not _checked():
        return [*arrays], frozenset()
    axes = frozenset[str]().union(*map(_axes, arrays))
    return _cast([*arrays], [axes] * len(arrays)), axes


def _checked() -> bool:
    """Whether JAX checks along which axes arrays vary."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True) if not mesh.empty else ()
    manual = next((name for name, kind in kinds if kind is AxisType.Manual), None)
    return manual is not None and bool(_axes(lax.axis_index(manual)))


def _axes(x: Any) -> Axes:
    """Along which axes an array varies."""
    return jax_0_10_varying(jax.typeof(x))


def _cast(tree: Any, wanted: Sequence[Axes]) -> Any:
    """Arrays that vary along what is wanted of each, and along all that they do already."""
    leaves, form = jax.tree.flatten(tree)
    cast = [
        jax_0_8_pcast(x, tuple(sorted(axes - _axes(x)))) if axes - _axes(x) else x
        for x, axes in zip(leaves, wanted, strict=True)
    ]
    return form.unflatten(cast)


def _given(call: Callable[..., Any], *args: Any) -> list[Axes]:
    """Along which axes the arrays vary that a function gives."""
    return [jax_0_10_varying(x) for x in jax.make_jaxpr(call)(*args).out_avals]


def _alike(branches: Sequence[Callable[..., Any]], *args: Any) -> Sequence[Callable[..., Any]]:
    """Functions whose results vary alike."""
    if not _checked():
        return branches
    every = zip(*(_given(branch, *args) for branch in branches), strict=True)
    wanted = [frozenset[str]().union(*axes) for axes in every]

    def one(branch: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: _cast(branch(*args), wanted)

    return [one(branch) for branch in branches]


def _carried(
    body: Callable[..., Any], init: Any, before: tuple[Any, ...] = ()
) -> tuple[Callable[..., Any], Any]:
    """A loop's body and what it begins with, such that both vary alike. ``before``: what the body
    is given besides."""
    if not _checked():
        return body, init
    wanted = [_axes(x) for x in jax.tree.leaves(init)]
    while (found := _both(wanted, _given(body, *before, init))) != wanted:
        wanted, init = found, _cast(init, found)
    return lambda *args: _cast(body(*args), wanted), init


def _both(some: Sequence[Axes], others: Sequence[Axes]) -> list[Axes]:
    return [a | b for a, b in zip(some, others, strict=True)]
