"""Codecs with levels other than equal steps, and codecs that choose the channels of each width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs import Codebook, Int3, Integer, MixedPrecision, TurboQuant
from kvjax.codecs.codebook import normal_levels
from tests.test_codecs import back, blocks, resolved, stored_and_back


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_are_the_means_of_their_nearest_normal_numbers(bits):
    levels = np.array(normal_levels(bits))
    x = np.random.default_rng(0).normal(size=200_000)
    nearest = np.abs(x[:, None] - levels).argmin(1)
    means = [x[nearest == code].mean() for code in range(2**bits)]
    np.testing.assert_allclose(levels, means, atol=0.03)


def test_codebook_stores_the_nearest_level():
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 16, 32)).astype(np.float32)
    codec = resolved(Codebook(3, group_size=16))
    store, found = stored_and_back(codec)(x)
    scale = np.asarray(codec.decode_scale(store.scale))[..., 0, :, :]
    split = x.reshape(*x.shape[:-1], 2, 16)
    squares = np.sqrt((split**2).mean(-1, keepdims=True))
    assert np.all((scale >= squares * (1 - 1e-6)) & (scale <= squares * 1.01))
    levels = np.array(normal_levels(3), np.float32)
    wanted = levels[np.abs(split[..., None] / scale[..., None] - levels).argmin(-1)] * scale
    np.testing.assert_allclose(np.asarray(found).reshape(split.shape), wanted, rtol=1e-6)


@pytest.mark.parametrize("bits", [2, 4])
def test_turboquant_has_a_smaller_error_than_integers_of_the_same_size(bits):
    x = blocks()
    turbo, integer = TurboQuant(bits), Integer(bits)
    assert resolved(turbo).nbytes(x.shape) == resolved(integer).nbytes(x.shape)
    errors = [np.square(back(resolved(codec), x) - x).mean() for codec in (turbo, integer)]
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_mixed_precision_stores_large_channels_more_precisely(bits):
    x = np.random.default_rng(0).normal(size=(1, 1, 3, 16, 20)).astype(np.float32)
    large = np.random.default_rng(1).permutation(20)[:10]
    x[..., large] *= 50
    plain = resolved(Integer(bits, "channel", zero_point=True))
    mixed = MixedPrecision(plain)
    store = mixed.encode(jnp.asarray(x))
    assert np.array_equal(
        np.sort(np.asarray(store.order)[..., :10]),
        np.broadcast_to(np.sort(large), (1, 1, 3, 1, 10)),
    )
    before, after = (np.square(back(codec, x) - x).mean((0, 1, 2, 3)) for codec in (plain, mixed))
    small = np.setdiff1d(np.arange(20), large)
    assert np.all(after[large] < before[large] / 2) and np.all(after[small] > before[small])


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_mixed_precision_multiplies_any_number_of_queries(rows):
    codec = resolved(MixedPrecision(Int3("channel", zero_point=True)))
    x = blocks(block=16, dim=24)
    store, decoded = stored_and_back(codec)(x)
    queries = np.random.default_rng(0).normal(size=(2, 2, rows, 24)).astype(np.float32)
    wanted = queries @ np.asarray(decoded).reshape(2, 2, 48, 24).swapaxes(2, 3)
    found = np.asarray(jax.jit(codec.scores)(queries, store))
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())
