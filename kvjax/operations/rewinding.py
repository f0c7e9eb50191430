"""Forget the newest tokens."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import OUT_OF_PAGES, REWOUND_TOO_FAR, usable
from kvjax.cache.explicit_axes import automatic
from kvjax.cache.paging import trimmed
from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.core.array_ops import flag_where
from kvjax.core.typing import Counts, PerRow
from kvjax.core.validation import is_traced
from kvjax.layouts import UNLIMITED


@automatic
def rewindable(cache: KVCache) -> PerRow:
    """int32[batch]: how many of its newest tokens each row can forget, and go on exactly.

    A ring has overwritten what lies further back than its slack.
    """
    cache = usable("kvjax.rewindable", cache)
    each = [
        _rewindable(layer, cache.length, cache.written[:, entry])
        for entry, layer in enumerate(cache.layers)
    ]
    return jnp.min(jnp.stack(each), axis=0)


@automatic
def rewind(cache: KVCache, tokens: int | Counts) -> KVCache:
    """Forget the newest tokens.

    Args:
      cache: the cache.
      tokens: how many, for all rows, or int32[batch], one number a row.

    Returns:
      The cache. A row that can't forget so many (see ``rewindable``) is left as it is and gets
      the status ``REWOUND_TOO_FAR``. Of a paged cache it gives pages back; where it ends in one
      that others have too, that is copied, or the row left, with the status ``OUT_OF_PAGES``.

    Raises:
      ValueError: if ``tokens`` is negative (where traced: the status) or no whole number, or has
        not one number a row.
    """
    cache = usable("kvjax.rewind", cache)
    back = whole_numbers("rewind takes a whole number, or one a row", tokens)
    if back.shape not in ((), (cache.batch,)):
        raise ValueError(
            f"rewind takes a whole number, or int32[batch={cache.batch}], got {list(back.shape)}"
        )
    if not is_traced(back) and np.any(np.asarray(back) < 0):
        raise ValueError(f"rewind takes tokens away: {np.min(back)} is negative")
    # A number that int32 can't hold is too many in any case.
    back = jnp.asarray(back.clip(-1, UNLIMITED), jnp.int32)
    back = jnp.broadcast_to(back, cache.length.shape)
    wrong = (back > rewindable(cache)) | (back < 0)
    length = jnp.where(wrong, cache.length, cache.length - back)
    status = cache.status | flag_where(wrong, REWOUND_TOO_FAR)
    if cache.pools:
        cache, had = trimmed(cache, length)
        length = jnp.where(had, length, cache.length)
        status |= flag_where(~had, OUT_OF_PAGES)
    return with_rows(cache, length=length, status=status)


def _rewindable(layer: LayerCache, length: PerRow, written: PerRow) -> PerRow:
    tokens = layer.policy.rewindable(length, written)
    if layer.low is None:
        return tokens
    window = layer.policy.layout.window or 0  # a dense layer lacks nothing
    back = length - (layer.low + window - 1)
    found = jnp.where(layer.low > 0, jnp.clip(back, 0, tokens), tokens)
    return found if layer.stack is None else jnp.min(found, axis=0)


def whole_numbers(wanted: str, x: Any) -> Any:
    """An integer array, traced or not, or a ``ValueError`` that says what was wanted."""
    if not is_traced(x):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(f"{wanted}, got {x!r:.80}") from None
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{wanted}, got {x!r:.80}")
    if is_traced(x):
        return x if x.dtype.itemsize > 4 else x.astype(jnp.int32)
    return x.astype(np.int64)
