"""Rotary tables against float64, near and far out."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.rotary import apply_rotary, rotary_table

FREQUENCIES = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)


def exact(x, positions, scale=1.0):
    angles = positions[:, None].astype(np.float64) * FREQUENCIES
    cos, sin = scale * np.cos(angles), scale * np.sin(angles)
    a, b = x[..., :8].astype(float), x[..., 8:16].astype(float)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., 16:]], axis=-1)


@pytest.mark.parametrize("start", [0, 1020, 4095, 131_070, 1_000_000, 2**30 - 10])
@pytest.mark.parametrize("width", [16, 24])
def test_turned_as_float64_would(start, width):
    x = np.random.default_rng(0).normal(size=(1, 3, 10, width)).astype(np.float32)
    positions = np.arange(start, start + 10)
    table = rotary_table(FREQUENCIES, start + 10, scale=1.25)
    found = apply_rotary(x, jnp.asarray(positions)[None], table)
    np.testing.assert_allclose(found[0], exact(x[0], positions, 1.25), atol=2e-6)


def test_a_context_of_a_million_takes_little_memory():
    table = rotary_table(FREQUENCIES, 1 << 20)
    assert sum(digits.nbytes for digits in table.digits) < 200_000
    endless = rotary_table(FREQUENCIES)
    assert sum(digits.nbytes for digits in endless.digits) < 300_000


def test_no_table_turns_nothing():
    x = jnp.ones((1, 1, 2, 4))
    assert apply_rotary(x, jnp.zeros((1, 2), jnp.int32), None) is x


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="max_len must be at least 1, got 0"):
        rotary_table(FREQUENCIES, 0)
    with pytest.raises(ValueError, match="max_len must be at most 1073741824"):
        rotary_table(FREQUENCIES, 2**30 + 1)
    with pytest.raises(ValueError, match=r"must be \[half\], got shape \(2, 4\)"):
        rotary_table(FREQUENCIES.reshape(2, 4), 8)
