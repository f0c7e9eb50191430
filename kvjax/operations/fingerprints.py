"""Which model it was: its shape, and sums over the bits of each of its weights."""

import hashlib
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array


class Weighed(Protocol):
    """A loaded model."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...


def fingerprint(model: Weighed | str | None) -> str | None:
    """A short text that tells one model's weights from another's: of a model, or as it is given.

    Of each weight two sums of its bits go into it, one of them by their places. They are of whole
    numbers, and so the same on any device and any mesh, and no array is moved.
    """
    if model is None or isinstance(model, str):
        return model
    named, _ = jax.tree_util.tree_flatten_with_path(model.params)
    found = hashlib.sha256(repr(model.config).encode())
    for (path, x), sums in zip(named, fetch([_sums(x) for _, x in named]), strict=True):
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} {sums}".encode())
    return found.hexdigest()[:32]


@jax.jit
def _sums(x: Array) -> Array:
    """Of an array's bits as uint32[2], modulo 2**32: their sum, and that by odd weights, which
    differ along each axis."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.int8)
    of = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    size = of(x.dtype).bits
    if size < 8:
        x, size = x.astype(jnp.float32), 32
    word = {8: jnp.uint8, 16: jnp.uint16}.get(size, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    places = jnp.uint32(1)
    for axis, _ in enumerate(bits.shape):
        step = jnp.uint32(2 * (7919 * axis + 1013))
        places = places + step * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(bits * places, dtype=jnp.uint32)])
