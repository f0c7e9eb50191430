"""The Mosaic GPU kernel, interpreted on a CPU. Races are errors."""

import types
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.attention import attend
from kvjax.attention.kernels import common
from kvjax.codecs import Centered, Int4, Rotated
from kvjax.core.compat import has_mosaic_gpu
from tests import test_tpu
from tests.test_tpu import POLICIES, by_position, in_one_program, run

pytestmark = pytest.mark.skipif(
    not has_mosaic_gpu(), reason="the Mosaic GPU kernel is for JAX 0.12 and later"
)
RARE = pytest.mark.rare


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels with race detection, in separate traces."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    params: Any = plgpu
    monkeypatch.setattr(common, "INTERPRETED", params.InterpretGPUParams(detect_races=True))
    monkeypatch.setattr(attend, "_attend_once", attend._attend)
    monkeypatch.setattr(test_tpu, "call", in_one_program())


def agree(name, head_dim, calls, dtype="float32", tolerance=1e-5, settings=()):
    """Assert that the kernel and the reference give the same outputs and the same cache."""
    policy = POLICIES[name]
    wanted, there = run(policy, "cpu", "reference", head_dim, calls, dtype, settings)
    found, cache = run(policy, "gpu", "pallas", head_dim, calls, dtype, settings)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max())
    for here, wanted in zip(by_position(cache), by_position(there), strict=True):
        assert wanted.keys() <= here.keys()
        for position, numbers in wanted.items():
            np.testing.assert_array_equal(here[position], numbers)


SERVED = [name for name in POLICIES if name not in ("int4", "pages-int4", "int2")]


@pytest.mark.parametrize(
    ("name", "head_dim", "dtype"),
    [
        ("int4", 64, "float32"),
        ("pages-int4", 64, "bfloat16"),
        ("int2", 64, "float32"),
        *(pytest.param(name, 64, "float32", marks=RARE) for name in SERVED),
        *(pytest.param(name, 128, "float32", marks=RARE) for name in ("raw", "int4", "sinks")),
        *(pytest.param("raw", dim, "float32", marks=RARE) for dim in (32, 80, 96, 256)),
        *(pytest.param(n, 64, "float16", marks=RARE) for n in ("raw", "int8", "sinks-int2")),
    ],
)
def test_the_kernel_agrees_with_the_reference(name, head_dim, dtype, interpreted):
    """Over several tiles, in calls of many, several and one token."""
    tolerance = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 2e-2}[dtype]
    agree(name, head_dim, (90, 5, 1), dtype, tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param((("window", 70),), marks=RARE),
        (("window", 70), ("sinks", 3)),
        pytest.param((("chunk", 96), ("soft_cap", 5.0), ("scale", 0.3)), marks=RARE),
    ],
    ids=str,
)
def test_the_kernel_and_settings(settings, interpreted):
    """Tiles before the window are not read."""
    agree("raw", 64, (150, 9), settings=settings)


@pytest.mark.parametrize("without", ["barrier_wait", "commit_smem"])
def test_planted_races_are_found(without, interpreted, monkeypatch):
    """Numbers are read before they arrive, or overwritten before they are read."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    from kvjax.attention.kernels import mosaic_gpu

    broken = types.SimpleNamespace(**vars(mosaic_gpu.plgpu))
    setattr(broken, without, lambda *_: None)
    monkeypatch.setattr(mosaic_gpu, "plgpu", broken)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
            run(POLICIES["raw"], "gpu", "pallas", 64, (300,))
    finally:
        monkeypatch.undo()
        gpu_callbacks.reset_gpu_interpret_mode_state()


def test_means_of_transformed_channels_are_not_read():
    """The kernel would add a mean to numbers under another transform."""
    from kvjax.attention.kernels import mosaic_gpu_formats

    for codec, is_read in ((Centered(Int4()), True), (Centered(Rotated(Int4())), False)):
        core = common.core_of(codec.resolve("float32", "gpu")).codec
        assert (mosaic_gpu_formats.format_of(core, 64, 64) is not None) == is_read
