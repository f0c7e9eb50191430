"""A piece of a store as kernels multiply it: without undoing scales that tokens have."""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs.codec import Codec, Store


class Tile(NamedTuple):
    """Numbers of some tokens of a head of keys: ``numbers`` times ``factor`` plus ``offset``.

    ``numbers``: [kv_heads, tokens, lanes], of which the ``side``-th ``head_dim`` lanes are theirs;
    ``turned``: [kv_heads, head_dim, tokens].
    ``factor``, ``offset``: float32[kv_heads, groups, tokens], a number for each group of channels;
    None is 1, and 0.
    """

    numbers: Array
    side: int = 0
    factor: Array | None = None
    offset: Array | None = None
    turned: bool = False


def each_token(rows: Array, tokens: int, lanes: int) -> Array:
    """A row [kv_heads, blocks, head_dim] of every block for all of so many tokens, side by side as
    often as there are lanes for it."""
    heads, blocks, width = rows.shape
    if width < lanes:
        rows = jnp.concatenate([rows] * (lanes // width), axis=-1)
    wide = jnp.broadcast_to(rows[:, :, None], (heads, blocks, tokens // blocks, lanes))
    return wide.reshape(heads, tokens, lanes)


class InTiles(Codec):
    """A codec that kernels may read tile by tile. Abstract; what it leaves open has answers here.

    ``parts``: runs of a block's tokens that share rows of what is stored. ``core``: the codec whose
    products are wanted once queries are turned by ``turn``, and mixtures back by ``unturn``.
    """

    known: ClassVar[bool] = True
    """Whether ``decode`` takes blocks without their first axes, as kernels have them."""

    @property
    def parts(self) -> int:
        return 1

    @property
    def core(self) -> Any:
        return self

    @property
    def turning(self) -> bool:
        """Whether ``turn`` and ``unturn`` change anything; they are linear."""
        return False

    def turn(self, queries: Array) -> Array:
        """Queries [batch, kv_heads, rows, head_dim] as ``core`` multiplies them with its store."""
        return queries

    def unturn(self, mixed: Array) -> Array:
        """A mixture of what ``core`` stores, as one of numbers."""
        return mixed

    def tiled(self, block: int, parts: int, head_dim: int) -> bool:
        """Whether ``tiles`` gives the runs of such blocks."""
        return False

    def tiles(self, store: Store, orders: Any, part: int, parts: int) -> list[Tile]:
        """Of some blocks of a row, in the order in which a TPU keeps them, the numbers of the
        ``part``-th of ``parts`` runs of every block's tokens: the sum of these tiles."""
        raise ValueError(f"{self!r} can't be read tile by tile")


class _Other(InTiles):
    """Any other codec, which kernels do not read."""

    known: ClassVar[bool] = False

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def resolve(self, model_dtype: str | None, platform: str) -> Codec:
        return self.codec.resolve(model_dtype, platform)

    def empty(self, shape: tuple[int, ...]) -> Store:
        return self.codec.empty(shape)

    def encode(self, x: Array) -> Store:
        return self.codec.encode(x)

    def decode(self, store: Store) -> Array:
        return self.codec.decode(store)


def in_tiles(codec: Codec) -> InTiles:
    """A codec with the answers that kernels ask for."""
    return codec if InTiles in type(codec).__mro__ else _Other(codec)  # type: ignore[return-value]
