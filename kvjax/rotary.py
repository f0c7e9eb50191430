"""Rotary position embedding: rotate pairs of channels by tables that models make.

The angle of position ``p`` and frequency ``f`` is ``p * f``. In float32 that product is off by
6e-8 of the angle, which at position 1,000,000 is a whole tenth of a radian's precision lost. The
table therefore holds the sines and cosines of ``p = coarse * STRIDE + fine`` in two small parts,
both computed in float64, and joins them by the addition theorem: exact to float32 rounding at any
position, and a few hundred kilobytes for a context of a million.

Source: Su et al., RoFormer, arXiv:2104.09864; pairs are (i, i + half), as in Transformers.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax._tree import state, static_field

STRIDE = 1024
"""Positions a row of the coarse table stands for."""


@state
class RotaryTable:
    """Sines and cosines for positions below ``max_len``.

    ``fine``: float32[STRIDE, 2, half] (cosine, sine) of ``p % STRIDE``, times the attention
    scale; ``coarse``: float32[ceil(max_len / STRIDE), 2, half] of ``p // STRIDE * STRIDE``.
    ``half`` is the number of rotated pairs: the first ``2 * half`` channels are rotated.
    """

    fine: Float[Array | np.ndarray, "stride 2 half"]
    coarse: Float[Array | np.ndarray, "rows 2 half"]
    max_len: int = static_field()

    def angles(self, positions: Int[Array, "..."]) -> tuple[Array, Array]:
        """Cosine and sine at ``positions``: two float32[..., half]."""
        fine = jnp.asarray(self.fine)[positions % STRIDE]
        if self.coarse.shape[0] == 1:
            return fine[..., 0, :], fine[..., 1, :]
        coarse = jnp.asarray(self.coarse)[positions // STRIDE]
        cos_f, sin_f = fine[..., 0, :], fine[..., 1, :]
        cos_c, sin_c = coarse[..., 0, :], coarse[..., 1, :]
        return cos_c * cos_f - sin_c * sin_f, sin_c * cos_f + cos_c * sin_f


def rotary_table(
    inverse_frequencies: np.ndarray, max_len: int, *, scale: float = 1.0
) -> RotaryTable:
    """Make the table of a model.

    Args:
      inverse_frequencies: [half], radians a position, one a pair of channels.
      max_len: positions 0 to ``max_len - 1`` can be asked for.
      scale: what the rotated channels are multiplied by (yarn and longrope scale attention so).

    Raises:
      ValueError: if ``max_len`` is not positive or the frequencies are not one-dimensional.
    """
    if max_len < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    frequencies = np.asarray(inverse_frequencies, np.float64)
    if frequencies.ndim != 1:
        raise ValueError(f"inverse_frequencies must be [half], got shape {frequencies.shape}")

    def table(positions: np.ndarray, factor: float) -> np.ndarray:
        angles = positions.astype(np.float64)[:, None] * frequencies
        return (factor * np.stack([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)

    rows = -(-max_len // STRIDE)
    fine = table(np.arange(min(STRIDE, max_len)), scale)
    return RotaryTable(fine=fine, coarse=table(np.arange(rows) * STRIDE, 1.0), max_len=max_len)


def apply_rotary(
    x: Float[Array | np.ndarray, "batch heads new head_dim"],
    positions: Int[Array, "batch new"],
    table: RotaryTable | None,
) -> Float[Array, "batch heads new head_dim"]:
    """Rotate keys or queries to their positions.

    Args:
      x: [batch, heads, new, head_dim], unrotated.
      positions: int32[batch, new], the position of each token in its row.
      table: the layer's table; None gives ``x`` back (models without rotary positions).

    Returns:
      ``x`` rotated, in its own dtype; computed in float32. Channels past the table's pairs pass.
    """
    x = jnp.asarray(x)
    if table is None:
        return x
    cos, sin = (part[:, None] for part in table.angles(positions))
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = [
        (first * cos - second * sin).astype(x.dtype),
        (second * cos + first * sin).astype(x.dtype),
    ]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)
