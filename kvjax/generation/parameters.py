"""Parameters in place of others: whether they fit, and how they are made to."""

import functools
from typing import Any

import jax
import numpy as np

from kvjax.core.checks import is_traced


def check_like(params: Any, own: Any, *, dtypes: bool = True) -> None:
    """Raise ``ValueError`` if parameters are not of the names and shapes of a model's own, and with
    ``dtypes`` of their dtypes."""
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


def like(params: Any, own: Any) -> Any:
    """Parameters in the dtypes of a model's own and, where these are arrays, where they are."""
    check_like(params, own, dtypes=False)
    if any(is_traced(leaf) for leaf in jax.tree.leaves((params, own))):
        return _cast(tuple(leaf.dtype for leaf in jax.tree.leaves(own)), params)
    placed = [leaf for leaf in jax.tree.leaves(own) if isinstance(leaf, jax.Array)]
    shardings = tuple(leaf.sharding for leaf in placed if leaf.committed)
    dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(own))
    if len(shardings) < len(dtypes):  # of one device, and uncommitted
        return _cast(dtypes, params)
    params = jax.device_put(params, jax.tree.unflatten(jax.tree.structure(own), shardings))
    return _cast(dtypes, params)


@functools.partial(jax.jit, static_argnums=0)
def _cast(dtypes: tuple[Any, ...], params: Any) -> Any:
    leaves, structure = jax.tree.flatten(params)
    return structure.unflatten(x.astype(d) for x, d in zip(leaves, dtypes, strict=True))


def _named(params: Any) -> dict[str, Any]:
    """The arrays, each by its way from the top."""
    found = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
