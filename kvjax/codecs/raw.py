"""The codec that stores keys and values unchanged."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs.codec import Codec


@dataclass(frozen=True)
class Raw(Codec):
    """Store numbers in ``dtype``. This is lossless if the model computes in the same dtype.

    ``dtype``: the name of a floating-point dtype; None is the model's dtype.
    ``as_bits``: store the bits of 16-bit floats in a ``uint16`` array. Values do not change, and
    ``decode`` still returns ``dtype``. ``resolve`` sets it on platforms whose compiler would
    otherwise convert the whole array to float32 at every write.
    """

    dtype: str | None = None
    as_bits: bool = False

    blockwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"unknown dtype {self.dtype!r}") from None
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"Raw stores floating-point numbers, got dtype {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype.name)

    def resolve(self, model_dtype: str | None, platform: str) -> "Raw":
        """Fix the dtype, and how its bits are stored on ``platform``."""
        if self.dtype is None and model_dtype is None:
            raise ValueError(
                'the config has no dtype: name one, such as policy("static", dtype="float32")'
            )
        dtype = jnp.dtype(self.dtype or model_dtype)
        as_bits = dtype.itemsize == 2 and platform == "cpu" and _rewrites_16_bit_floats()
        return replace(self, dtype=dtype.name, as_bits=as_bits)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, self._stored_dtype)

    def encode(self, x: Array) -> Array:
        x = x.astype(self.dtype)
        return _to_bits(x) if self.as_bits else x

    def decode(self, store: Array) -> Array:
        return lax.bitcast_convert_type(store, jnp.dtype(self.dtype)) if self.as_bits else store

    @property
    def _stored_dtype(self) -> jnp.dtype:
        if self.dtype is None:
            raise ValueError("this Raw has no dtype yet: call resolve first")
        return jnp.dtype("uint16" if self.as_bits else self.dtype)


def _rewrites_16_bit_floats() -> bool:
    """Whether this JAX's CPU compiler widens a whole 16-bit float array to update a slice."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)


def without_gradient(function: Callable[[Array], Array], reason: str) -> Callable[[Array], Array]:
    """``function``, but differentiating it raises ``ValueError(reason)``."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: tuple[Array], tangents: tuple[Array]) -> NoReturn:
        raise ValueError(reason)

    return guarded


_to_bits = without_gradient(
    lambda x: lax.bitcast_convert_type(x, jnp.uint16),
    "a 16-bit cache has no gradient on this CPU, because its bits are stored as integers: use "
    'policy("static", dtype="float32")',
)
