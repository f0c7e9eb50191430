"""Parameters in place of others: whether they fit, and how they are made to."""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax

from kvjax.core.checks import is_traced
from kvjax.generation.sources import SOURCE


def check_like(params: Any, own: Any, *, dtypes: bool = True) -> None:
    """Raise ``ValueError`` if parameters are not of the names and shapes of a model's own, and with
    ``dtypes`` of their dtypes."""
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(params)):
        raise ValueError("parameters must be a tree of arrays, with nothing else in it")
    if _forms(params, dtypes) == _forms(own, dtypes):
        return
    if isinstance(own, dict) and SOURCE in own and SOURCE not in params:
        raise ValueError(
            "what the encoder has read goes by the parameters that it had: give others to the "
            "model before it reads, and let it read again"
        )
    theirs, ours = _named(params), _named(own)
    for name in ours.keys() - theirs.keys():
        raise ValueError(f"the parameters lack {name}, which the model's own have")
    for name in theirs.keys() - ours.keys():
        raise ValueError(f"the parameters have {name}, which the model's own have not")
    for name, leaf in ours.items():
        found, wanted = np.shape(theirs[name]), np.shape(leaf)
        if found != wanted:
            raise ValueError(f"{name} is {list(found)}, and {list(wanted)} in the model's own")
        other, dtype = theirs[name].dtype, leaf.dtype
        if dtypes and other != dtype:
            raise ValueError(
                f"{name} is {other}, and {dtype} in the model's own: lm.put(params) casts them"
            )
    if jax.tree.structure(params) != jax.tree.structure(own):
        raise ValueError(
            f"the parameters are a {type(params).__name__} of another structure than the model's "
            f"own, a {type(own).__name__}"
        )


def strong(params: Any) -> Any:
    """Parameters without weak types, such as that of ``jnp.full(shape, 0.5)``: an optimizer returns
    strongly typed ones, which would compile every program again."""
    return jax.tree.map(_strong, params)


def _strong(x: Any) -> Any:
    weak = isinstance(x, jax.Array) and jax.typeof(x).weak_type
    return lax.convert_element_type(x, x.dtype) if weak else x


def like(params: Any, own: Any) -> Any:
    """Parameters in the dtypes of a model's own and, where these are arrays, where they are. What
    is so already is not copied."""
    check_like(params, own, dtypes=False)
    leaves, structure = jax.tree.flatten(params)
    wanted = jax.tree.leaves(own)
    placed = [_there(x, to) for x, to in zip(leaves, wanted, strict=True)]
    other = [n for n, to in enumerate(wanted) if placed[n].dtype != to.dtype]
    dtypes = tuple(wanted[n].dtype for n in other)
    for n, x in zip(other, _cast([placed[n] for n in other], dtypes), strict=True):
        placed[n] = x
    return strong(structure.unflatten(placed))


def _there(x: Any, to: Any) -> Any:
    """An array where another one is, if both are somewhere."""
    if is_traced(x) or is_traced(to) or not isinstance(to, jax.Array):
        return x
    here = isinstance(x, jax.Array) and x.sharding.device_set == to.sharding.device_set
    # What is uncommitted, and on the same device, stays so.
    return x if here and not to.committed else jax.device_put(x, to.sharding)


@functools.partial(jax.jit, static_argnums=1)
def _cast(arrays: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]


def _forms(params: Any, dtypes: bool) -> tuple[Any, ...]:
    """What is compared, without names, which take longer: of every rollout."""
    leaves, structure = jax.tree.flatten(params)
    return structure, [(np.shape(x), x.dtype if dtypes else None) for x in leaves]


def _named(params: Any) -> dict[str, Any]:
    """The arrays, each by its way from the top."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
