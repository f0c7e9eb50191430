"""Rotary position embedding: rotation of channel pairs by angles from a table.

The angle at position ``p`` with frequency ``f`` is ``p * f``. In float32 the relative error of this
product is 6e-8, which is an error of up to 0.06 radians at position 1,000,000. To avoid this, a
position is split into digits in base ``STRIDE``. The table has the sines and cosines for each
digit, computed in float64, and combines them with the addition theorem. The result is exact to
float32 rounding at any position. Even for unlimited length the table takes less than a megabyte.

Source: Su et al., RoFormer, arXiv:2104.09864. Channel pairs are (i, i + half), as in Transformers.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.core.pytree import pytree_dataclass, register_with_flax
from kvjax.core.validation import UNLIMITED, ArgumentError

STRIDE = 1024
"""The base of the digits of a position."""


@pytree_dataclass
class RotaryTable:
    """Sines and cosines for every position below a limit.

    A position is written with digits in base ``STRIDE``, and the rotations of its digits are
    combined.

    ``digits`` has one array float32[rows, 2, half] per digit, lowest digit first, with cosines and
    sines on axis 1. Row ``d`` of array ``i`` is the rotation by ``d * STRIDE**i`` positions. The
    first array also includes the factor ``scale`` of ``rotary_table``. ``half`` is the number of
    rotated pairs: the first ``2 * half`` channels are rotated.

    Example:
      ```python
      table = kvjax.rotary_table(10000.0 ** -(np.arange(0, 64, 2) / 64), max_len=64)
      angles = table.angles(jnp.array([0, 1, 2]))
      ```
    """

    digits: tuple[Float[Array | np.ndarray, "rows 2 half"], ...]

    def angles(self, positions: Int[Array, "..."]) -> tuple[Array, Array]:
        """Return the cosines and the sines at ``positions``, each float32[..., half]."""

        def part(digit: int) -> tuple[Array, Array]:
            rows = jnp.asarray(self.digits[digit])[positions // STRIDE**digit % STRIDE]
            return rows[..., 0, :], rows[..., 1, :]

        cos, sin = part(0)
        for digit in range(1, len(self.digits)):
            more_cos, more_sin = part(digit)
            cos, sin = cos * more_cos - sin * more_sin, sin * more_cos + cos * more_sin
        return cos, sin


def rotary_table(
    inverse_frequencies: np.ndarray, max_len: int | None = None, *, scale: float = 1.0
) -> RotaryTable:
    """Create a model's rotary table.

    Args:
      inverse_frequencies: [half], radians per position, one per pair of channels.
      max_len: the table covers positions 0 to ``max_len - 1``; by default ``max_len`` is 2**30.
      scale: a factor by which rotated channels are multiplied (used by yarn and longrope).

    Raises:
      ValueError: if ``max_len`` is not positive or more than 2**30, or the frequencies are not
        one-dimensional.

    Example:
      ```python
      frequencies = 10000.0 ** -(np.arange(0, 64, 2) / 64)
      table = kvjax.rotary_table(frequencies, max_len=64)
      ```
    """
    limit = UNLIMITED if max_len is None else max_len
    if limit < 1:
        raise ArgumentError(f"max_len must be at least 1, got {max_len}", param="max_len")
    if limit > UNLIMITED:
        raise ArgumentError(f"max_len must be at most {UNLIMITED}, got {max_len}", param="max_len")
    frequencies = np.asarray(inverse_frequencies, np.float64)
    if frequencies.ndim != 1:
        raise ArgumentError(
            f"inverse_frequencies must be [half], got shape {frequencies.shape}",
            param="inverse_frequencies",
        )
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
      table: the layer's table. If it is None, ``x`` is returned unchanged.

    Returns:
      The rotated ``x`` in its dtype, computed in float32. Channels after the table's pairs are
      unchanged.

    Example:
      ```python
      table = kvjax.rotary_table(10000.0 ** -(np.arange(0, 64, 2) / 64), max_len=64)
      rotated = kvjax.apply_rotary(jnp.ones((1, 2, 3, 64)), jnp.array([[0, 1, 2]]), table)
      ```
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
