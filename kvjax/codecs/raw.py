"""The codec that stores keys and values as they are."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs._tiles import InTiles, Tile


@dataclass(frozen=True)
class Raw(InTiles):
    """Store numbers in ``dtype``, without loss where the model computes in the same dtype.

    ``dtype``: a floating dtype's name; None is the dtype the model computes in.
    ``as_bits``: keep a 16-bit float's bits in a ``uint16`` array. The values are the same, and
    every reader gets ``dtype``; it is chosen by ``resolve`` where the compiler would otherwise
    rewrite the whole array in float32 at every write.
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
        """Fix what was left open: the dtype, and how its bits are best kept on ``platform``."""
        if self.dtype is None and model_dtype is None:
            raise ValueError(
                'the config has no dtype: name one, such as policy("static", dtype="float32")'
            )
        dtype = jnp.dtype(self.dtype or model_dtype)
        narrow = dtype.itemsize == 2 and platform == "cpu" and _rewrites_16_bit_floats()
        return replace(self, dtype=dtype.name, as_bits=narrow)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, self._stored_dtype)

    def encode(self, x: Array) -> Array:
        x = x.astype(self.dtype)
        return _to_bits(x) if self.as_bits else x

    def decode(self, store: Array) -> Array:
        return lax.bitcast_convert_type(store, jnp.dtype(self.dtype)) if self.as_bits else store

    def tiled(self, block: int, parts: int, head_dim: int) -> bool:
        return not self.as_bits

    def tiles(self, store: Array, orders: Any, part: int, parts: int) -> list[Tile]:
        return [Tile(*orders.run(store, part, parts), turned=orders.turned)]

    @property
    def _stored_dtype(self) -> Any:
        if self.dtype is None:
            raise ValueError("this Raw has no dtype yet: init_cache takes it from the model")
        return jnp.uint16 if self.as_bits else jnp.dtype(self.dtype)


def _rewrites_16_bit_floats() -> bool:
    """Whether this version's CPU compiler widens a whole 16-bit float array to update a slice."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)


def without_gradient(call: Callable[[Array], Array], why: str) -> Callable[[Array], Array]:
    """``call``; asked for its gradient, it says why there is none."""
    refusing = jax.custom_jvp(call)

    @refusing.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise ValueError(why)

    return refusing


_to_bits = without_gradient(
    lambda x: lax.bitcast_convert_type(x, jnp.uint16),
    "no gradient passes through a 16-bit cache on this CPU (its bits are kept as integers): use "
    'policy("static", dtype="float32")',
)
