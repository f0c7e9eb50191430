"""What the libraries' kernels ask for: one raw array a layer, from its first slot on."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from kvjax.attention.blocks import Turned, blockwise
from kvjax.attention.mask import Sight
from kvjax.attention.segments import Segment
from kvjax.core.typing import Array, Mixed, Rows


def refuse(path: str, reasons: dict[str, object]) -> None:
    """Raise ``ValueError`` for the first reason that is true."""
    for reason, true in reasons.items():
        if true:
            raise ValueError(f"the attention path {path!r} {reason}")


def one_raw(path: str, parts: list[Segment], sight: Sight) -> tuple[Array, Array]:
    """Keys and values [batch, kv_heads, slots, head_dim] of a layer of one segment, as numbers.

    Raises:
      ValueError: if there are more, or the call asks for what no library's kernel has.
    """
    refuse(path, {
        "reads raw caches alone": parts[0].part is not None,
        "adds no bias to scores": sight.bias is not None,
        "sees no chunks": sight.chunk is not None,
        "reads the slots of one device alone": sight.axis is not None,
        "keeps no sinks": len(parts) > 1 or sight.sinks,
    })  # fmt: skip
    keys, values = parts[0].codecs
    return keys.decode(parts[0].keys), values.decode(parts[0].values)


def from_beginning(
    both: Turned,
    kv_heads: int,
    parts: list[Segment],
    length: Rows,
    sight: Sight,
    run: Callable[[Array, Array, Array], Array],
) -> Mixed:
    """``run(keys, values, present)`` over the first slots, where the text of every row begins with
    this call, and they hold positions 0 to ``new - 1``; else the walk. ``present``: bool[batch,
    new], what a row has of them; values of the others are 0."""
    new, segment = both[0].shape[2], parts[0]
    if new > segment.size:
        return blockwise(both, kv_heads, parts, length, sight)

    def text() -> Mixed:
        present = jnp.arange(new) < length[:, None]
        keys, values = (
            codec.decode(store[:, :, :new]).astype(both[0].dtype)
            for codec, store in zip(segment.codecs, (segment.keys, segment.values), strict=True)
        )
        values = jnp.where(present[:, None, :, None], values, 0)
        return jnp.where((length > 0)[:, None, None, None], run(keys, values, present), 0)

    def walked() -> Mixed:
        return blockwise(both, kv_heads, parts, length, sight)

    # Positions that all are the last one's are those of a call that is not causal.
    own = sight.queries == jnp.arange(new, dtype=jnp.int32)
    return lax.cond(jnp.all(own), text, walked)
