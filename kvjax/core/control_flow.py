"""Loops and branches like in ``lax``, which also work inside a user's ``jax.shard_map``.

There, JAX tracks along which mesh axes each array varies (``check_vma``). A loop must return its
carry with the same axes as the initial carry, and all branches must return the same axes.
Constants, such as initial zeros, vary along no axis, so these functions cast them. Outside of
``jax.shard_map``, they do the same as the functions of ``lax``.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jaxtyping import Array, PyTree

from kvjax.core.compat import jax_0_8_pcast, jax_0_10_varying

Axes = frozenset[str]


def cond(
    pred: Array | np.ndarray | bool,
    true_fun: Callable[..., PyTree],
    false_fun: Callable[..., PyTree],
    *args: PyTree,
) -> PyTree:
    """Call ``lax.cond``. This also works inside ``jax.shard_map``."""
    return lax.cond(pred, *_match_branches((true_fun, false_fun), *args), *args)


def switch(
    index: Array | np.ndarray | int, branches: Sequence[Callable[..., PyTree]], *args: PyTree
) -> PyTree:
    """Call ``lax.switch``. This also works inside ``jax.shard_map``."""
    return lax.switch(index, _match_branches(branches, *args), *args)


def fori_loop(
    lower: Array | np.integer | int,
    upper: Array | np.integer | int,
    body: Callable[[Array, PyTree], PyTree],
    init: PyTree,
) -> PyTree:
    """Call ``lax.fori_loop`` with an int32 counter, even if 64-bit types are enabled. This also
    works inside ``jax.shard_map``."""
    lower, upper = (
        x.astype(jnp.int32) if isinstance(x, jax.Array) else np.int32(x) for x in (lower, upper)
    )
    body, init = _match_carry(body, init, before=(lower,))
    # If the trip count is static, lax creates the counter itself, so cast it.
    return lax.fori_loop(lower, upper, lambda i, x: body(i.astype(jnp.int32), x), init)


def while_loop(
    cond_fun: Callable[[PyTree], Array], body: Callable[[PyTree], PyTree], init: PyTree
) -> PyTree:
    """Call ``lax.while_loop``. This also works inside ``jax.shard_map``."""
    body, init = _match_carry(body, init)
    return lax.while_loop(cond_fun, body, init)


def scan(
    body: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
) -> tuple[PyTree, PyTree]:
    """Call ``lax.scan``. This also works inside ``jax.shard_map``."""
    if not _axes_are_checked():
        return lax.scan(body, init, xs, length)
    first = jax.tree.map(lambda x: x[0], xs)
    init = _match_carry(lambda carry: body(carry, first)[0], init)[1]
    axes = [_axes(x) for x in jax.tree.leaves(init)]

    def cast(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        after, y = body(carry, x)
        return _cast(after, axes), y

    return lax.scan(cast, init, xs, length)


def match_varying(arrays: Sequence[PyTree]) -> tuple[list[PyTree], Axes]:
    """Cast the inputs of a kernel so that all vary along the same mesh axes. Returns the arrays and
    the axes."""
    if not _axes_are_checked():
        return [*arrays], frozenset()
    axes = frozenset[str]().union(*map(_axes, arrays))
    return _cast([*arrays], [axes] * len(arrays)), axes


def _axes_are_checked() -> bool:
    """Return whether JAX checks along which axes arrays vary."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True) if not mesh.empty else ()
    manual = next((name for name, kind in types if kind is AxisType.Manual), None)
    return manual is not None and bool(_axes(lax.axis_index(manual)))


def _axes(x: Array) -> Axes:
    """Return the axes along which an array varies."""
    return jax_0_10_varying(jax.typeof(x))


def _cast(tree: PyTree, axes: Sequence[Axes]) -> PyTree:
    """Cast each leaf to also vary along its entry of ``axes``."""
    leaves, structure = jax.tree.flatten(tree)
    cast = [
        jax_0_8_pcast(x, tuple(sorted(to - _axes(x)))) if to - _axes(x) else x
        for x, to in zip(leaves, axes, strict=True)
    ]
    return structure.unflatten(cast)


def _result_axes(function: Callable[..., PyTree], *args: PyTree) -> list[Axes]:
    """Return the axes along which each result of a function varies."""
    return [jax_0_10_varying(x) for x in jax.make_jaxpr(function)(*args).out_avals]


def _match_branches(
    branches: Sequence[Callable[..., PyTree]], *args: PyTree
) -> Sequence[Callable[..., PyTree]]:
    """Wrap branches so that their results vary along the same axes."""
    if not _axes_are_checked():
        return branches
    per_result = zip(*(_result_axes(branch, *args) for branch in branches), strict=True)
    axes = [frozenset[str]().union(*each) for each in per_result]

    def wrap(branch: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return lambda *args: _cast(branch(*args), axes)

    return [wrap(branch) for branch in branches]


def _match_carry(
    body: Callable[..., PyTree], init: PyTree, before: tuple[PyTree, ...] = ()
) -> tuple[Callable[..., PyTree], PyTree]:
    """Cast a loop body's result and its initial carry so that both vary along the same axes.

    ``before`` are the body's arguments before the carry.
    """
    if not _axes_are_checked():
        return body, init
    axes = [_axes(x) for x in jax.tree.leaves(init)]
    while (more := _union(axes, _result_axes(body, *before, init))) != axes:
        axes, init = more, _cast(init, more)
    return lambda *args: _cast(body(*args), axes), init


def _union(some: Sequence[Axes], others: Sequence[Axes]) -> list[Axes]:
    return [a | b for a, b in zip(some, others, strict=True)]
