"""Which model it was: its shape, and some numbers of each of its weights."""

import hashlib
from typing import Any, Protocol

import jax

from kvjax.core.device import fetch


class Weighed(Protocol):
    """A loaded model."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...


def fingerprint(model: Weighed | str | None) -> str | None:
    """A short text that tells one model's weights from another's: of a model, or as it is given.

    Of each weight the first and the last numbers along its last axis go into it, so that no large
    array is moved, and a change of one number in its middle is not seen.
    """
    if model is None or isinstance(model, str):
        return model
    named, _ = jax.tree_util.tree_flatten_with_path(model.params)
    ends = [[x[(at,) * (x.ndim - 1)][:256] for at in (0, -1)] for _, x in named if x.ndim]
    found = hashlib.sha256(repr(model.config).encode())
    for path, x in named:
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
    for x in jax.tree.leaves(fetch(ends)):
        found.update(x.tobytes())
    return found.hexdigest()[:32]
