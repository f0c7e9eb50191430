"""Quantized caches beside those of Transformers: which numbers share a scale; a trained model."""

import os
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.codecs import Int8
from kvjax.quality.evaluation import evaluate

SHAPE = (1, 2, 128, 64)
BIG = 1e6
PLACES = [(0, 0, 3, 5), (0, 1, 64, 0), (0, 1, 127, 63), (0, 0, 70, 33)]


@pytest.fixture(scope="module")
def cache_layers(torch: Any, transformers: Any) -> Any:
    """The classes of Transformers' quantized layers, with what they import installed."""
    for module in ("optimum.quanto", "hqq"):
        pytest.importorskip(module, reason=f"needs {module} (the extra `oracle`)")
    # quanto compiles a function of its own with the ninja of its environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    from transformers import cache_utils

    return {"quanto": cache_utils.QuantoQuantizedLayer, "hqq": cache_utils.HQQQuantizedLayer}


def theirs(layers: Any, torch: Any, backend: str, nbits: int, axis: int, x: np.ndarray) -> Any:
    """Numbers as a layer of Transformers gives them back."""
    layer = layers[backend](nbits, axis, axis, 64, 128)
    layer.keys = torch.zeros(0)
    with torch.no_grad():
        kept = layer._quantize(torch.tensor(x).contiguous(), axis=axis)
        return layer._dequantize(kept).reshape(SHAPE).float().numpy()


def ours(backend: str, nbits: int, axis: int, x: np.ndarray) -> np.ndarray:
    """Numbers as the policy of the same settings gives them back."""
    policy = kvjax.policies.transformers_policy(
        backend, nbits=nbits, axis_key=axis, axis_value=axis
    )
    assert policy.block == 64 and policy.recent == 1
    codec = policy.keys.resolve("float32", "cpu")
    blocks = jnp.asarray(x).reshape(1, 2, 2, 64, 64)
    return np.asarray(codec.decode(codec.encode(blocks))).reshape(SHAPE)


def group_of(coded: Any, place: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The numbers that share a scale with the one at a place. All are 0 or 1, which every codec
    keeps; where that one is very large, 0 and 1 in its group become the same."""
    lost = np.zeros(SHAPE, bool)
    lost[place] = True
    ones = np.random.default_rng(0).integers(0, 2, SHAPE).astype(np.float32)
    for x in (ones, 1 - ones):
        x[place] = BIG
        lost |= np.abs(coded(x) - x) > 0.4
    return {tuple(at) for at in np.argwhere(lost).tolist()}


@pytest.mark.parametrize(
    ("backend", "nbits", "axis"),
    [("quanto", 4, 0), ("quanto", 4, -1), ("quanto", 2, 0), ("quanto", 2, -1), ("hqq", 4, 1),
     ("hqq", 8, 1)],
)  # fmt: skip
def test_groups_are_those_of_transformers(
    cache_layers: Any, torch: Any, backend: str, nbits: int, axis: int
) -> None:
    for place in PLACES:
        here = group_of(lambda x: ours(backend, nbits, axis, x), place)
        there = group_of(lambda x: theirs(cache_layers, torch, backend, nbits, axis, x), place)
        assert here == there and len(here) == 64
    # Scales are rounded to 16 bits here and not there: a code may be the next one.
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    error = np.abs(
        ours(backend, nbits, axis, x) - theirs(cache_layers, torch, backend, nbits, axis, x)
    )
    assert error.max() < 1.1 * np.ptp(x) / (2**nbits - 1)


def test_axis_0_of_hqq_is_one_channel_spread_over_the_tensor(cache_layers: Any, torch: Any) -> None:
    for place in PLACES:
        there = group_of(lambda x: theirs(cache_layers, torch, "hqq", 4, 0, x), place)
        here = group_of(lambda x: ours("hqq", 4, 0, x), place)
        assert len(here) == len(there) == 64 and here != there
        assert {at[3] for at in there} == {at[3] for at in here} == {place[3]}
        assert {at[1] for at in there} == {0, 1} and {at[1] for at in here} == {place[1]}


def test_8_bits_on_a_trained_model(stories: Path) -> None:
    """Text of its own, sampled; its heads have 8 channels, so scales go along tokens."""
    lm = models.load(stories, dtype="float32")
    assert lm.tokenizer is not None
    prompts = [lm.tokenizer.encode(word)[:2] for word in ("Once", "One", "Tim", "The")]
    made = kvjax.generate(
        lm, prompts, max_new_tokens=510, temperature=1.0, seed=1, eos_token_ids=()
    )
    tokens = [
        token for prompt, new in zip(prompts, made.tokens, strict=True) for token in prompt + new
    ]
    assert len(tokens) == 4 * 512
    policy = kvjax.CachePolicy(keys=Int8("channel"), values=Int8("channel"))
    quality = evaluate(lm, tokens, {"": policy}, context=512)[""]
    assert quality.bytes.of_bfloat16 <= 0.52
    assert quality.overall.perplexity_ratio <= 1.001
    assert quality.overall.mean_kl <= 0.0015
    assert quality.overall.top1 >= 0.984
