"""Rotary position embedding: rotate pairs of channels by tables that models make.

The angle of position ``p`` and frequency ``f`` is ``p * f``. In float32 that product is off by
6e-8 of the angle, which at position 1,000,000 is a whole tenth of a radian's precision lost. The
table therefore holds sines and cosines of ``p``'s digits to the base ``STRIDE``, each computed in
float64, and joins them by the addition theorem: exact to float32 rounding at any position, and
under a megabyte for a text that never ends.

Source: Su et al., RoFormer, arXiv:2104.09864; pairs are (i, i + half), as in Transformers.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.core.pytree import pytree_dataclass, register_with_flax
from kvjax.core.validation import UNLIMITED

STRIDE = 1024
"""The base of the digits."""


@pytree_dataclass
class RotaryTable:
    """Sines and cosines of every position below a limit.

    ``digits``: float32[rows, 2, half] (cosine, sine) each: of ``d`` for the last digit, times the
    attention scale, of ``d * STRIDE`` for the one before it, and so on; as many as the positions
    need. ``half`` is the number of rotated pairs: the first ``2 * half`` channels are rotated.
    """

    digits: tuple[Float[Array | np.ndarray, "rows 2 half"], ...]

    def angles(self, positions: Int[Array, "..."]) -> tuple[Array, Array]:
        """Cosine and sine at ``positions``: two float32[..., half]."""

        def part(digit: int) -> tuple[Array, Array]:
            found = jnp.asarray(self.digits[digit])[positions // STRIDE**digit % STRIDE]
            return found[..., 0, :], found[..., 1, :]

        cos, sin = part(0)
        for digit in range(1, len(self.digits)):
            more_cos, more_sin = part(digit)
            cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
        return cos, sin


def rotary_table(
    inverse_frequencies: np.ndarray, max_len: int | None = None, *, scale: float = 1.0
) -> RotaryTable:
    """Make the table of a model.

    Args:
      inverse_frequencies: [half], radians a position, one a pair of channels.
      max_len: positions 0 to ``max_len - 1`` can be asked for; by default 2**30 of them.
      scale: what the rotated channels are multiplied by (yarn and longrope scale attention so).

    Raises:
      ValueError: if ``max_len`` is not positive or more than 2**30, or the frequencies are not
        one-dimensional.
    """
    limit = UNLIMITED if max_len is None else max_len
    if limit < 1:
        raise ValueError(f"max_len must be at least 1, got {max_len}")
    if limit > UNLIMITED:
        raise ValueError(f"max_len must be at most {UNLIMITED}, got {max_len}")
    frequencies = np.asarray(inverse_frequencies, np.float64)
    if frequencies.ndim != 1:
        raise ValueError(f"inverse_frequencies must be [half], got shape {frequencies.shape}")
    digits, base = [], 1
    while not digits or base < limit:
        rows = np.arange(min(STRIDE, -(-limit // base)), dtype=np.float64)
        angles = base * rows[:, None] * frequencies
        factor = scale if base == 1 else 1.0
        table = factor * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        digits.append(table.astype(np.float32))
        base *= STRIDE
    register_with_flax()
    return RotaryTable(tuple(digits))


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
