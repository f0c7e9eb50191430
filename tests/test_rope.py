"""Rotary kinds: their frequencies against the formulas, in float64 and written out again here."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.layouts import Ring
from kvjax.memory import InferenceLimits
from kvjax.models import LlamaConfig, RopeConfig, model_rotary
from kvjax.models.rope import inverse_frequencies
from tests.test_prefixes import small

HEAD_DIM, TRAINED = 64, 2048


def config(kind: str = "default", *, partial: float = 1.0, theta: float = 1e4, **given: Any):
    rope = RopeConfig(kind, theta, partial, tuple(sorted(given.items())))
    return LlamaConfig(
        "llama", 10, 64, 64, 1, 1, 1, HEAD_DIM, TRAINED, 1e-6, "silu", True, False, False, False,
        False, rope=rope, windows=(None,),
    )  # fmt: skip


def plain(theta: float = 1e4, dim: int = HEAD_DIM) -> np.ndarray:
    return theta ** -(np.arange(0, dim, 2) / dim)


def frequencies(config: LlamaConfig, max_len: int = 128) -> np.ndarray:
    found, _ = inverse_frequencies(config, max_len)
    assert found.dtype == np.float32
    return found


def close(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("theta", [1e3, 1e4, 5e5, 1e6])
def test_default(theta: float) -> None:
    close(frequencies(config(theta=theta)), plain(theta))
    assert inverse_frequencies(config(), 8)[1] == 1.0


def test_linear() -> None:
    close(frequencies(config("linear", factor=4.0)), plain() / 4)


def test_partial() -> None:
    found = frequencies(config("linear", factor=2.0, partial=0.25))
    close(found, plain(dim=16) / 2)


def test_proportional() -> None:
    """The first pairs turn as those of the whole head do, the others do not turn."""
    found = frequencies(config("proportional", factor=2.0, partial=0.3))
    turned = int(0.3 * HEAD_DIM // 2)
    close(found[:turned], plain()[:turned] / 2)
    assert found.shape == (HEAD_DIM // 2,) and not found[turned:].any()
    close(frequencies(config("proportional")), plain())


def test_dynamic() -> None:
    dynamic = config("dynamic", factor=2.0)
    close(frequencies(dynamic, TRAINED), plain())
    for max_len in (TRAINED + 1, 3 * TRAINED):
        growth = 2.0 * max_len / TRAINED - 1
        theta = 1e4 * growth ** (HEAD_DIM / (HEAD_DIM - 2))
        close(frequencies(dynamic, max_len), plain(theta))


def test_llama3() -> None:
    found = frequencies(
        config(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        )
    )
    turns = 256 * plain() / (2 * math.pi)
    blend = np.clip((turns - 1.0) / 3.0, 0, 1)
    close(found, plain() * (blend + (1 - blend) / 8))
    assert found[0] == np.float32(1)
    assert (turns < 1).any() and (turns > 4).any() and ((turns > 1) & (turns < 4)).any()


def yarn(**given: Any) -> LlamaConfig:
    base = {"factor": 4.0, "truncate": True, "original_max_position_embeddings": 512}
    return config("yarn", **{**base, **given})


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("betas", [{}, {"beta_fast": 20, "beta_slow": 2}])
def test_yarn(truncate: bool, betas: dict[str, int]) -> None:
    def pair(turns: float) -> float:
        return HEAD_DIM * math.log(512 / (turns * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = pair(betas.get("beta_fast", 32)), pair(betas.get("beta_slow", 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(HEAD_DIM // 2) - low) / (high - low), 0, 1)
    close(frequencies(yarn(truncate=truncate, **betas)), plain() * (1 - ramp + ramp / 4))


def test_yarn_scale() -> None:
    def scale(**given: Any) -> float:
        return inverse_frequencies(yarn(**given), 8)[1]

    assert scale() == pytest.approx(0.1 * math.log(4) + 1)
    assert scale(attention_factor=1.5) == 1.5
    ratio = (0.1 * 0.5 * math.log(4) + 1) / (0.1 * 2 * math.log(4) + 1)
    assert scale(mscale=0.5, mscale_all_dim=2) == pytest.approx(ratio)
    assert scale(mscale=0.5) == scale()
    assert scale(factor=0.5) == 1.0
    assert scale(factor=None) == scale()  # 2,048 over 512


def test_longrope() -> None:
    short = tuple(1 + i / 32 for i in range(32))
    long = tuple(2.0 + i for i in range(32))
    rope = config(
        "longrope",
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=512,
    )
    close(frequencies(rope, 512), plain() / np.array(short))
    close(frequencies(rope, 513), plain() / np.array(long))
    expected = math.sqrt(1 + math.log(4) / math.log(512))
    assert inverse_frequencies(rope, 8)[1] == pytest.approx(expected)
    for extra, scale in (({"attention_factor": 1.2}, 1.2), ({"factor": 0.9}, 1.0)):
        given = {**dict(rope.rope.parameters), **extra}
        assert inverse_frequencies(config("longrope", **given), 8)[1] == scale


def test_table() -> None:
    table = model_rotary(yarn(), 3000)
    assert model_rotary(yarn(), 3000) is table
    positions = jnp.array([0, 1, 2999])
    cos, sin = table.angles(positions)
    found, scale = inverse_frequencies(yarn(), 3000)
    angles = np.asarray(positions)[:, None] * found.astype(np.float64)
    np.testing.assert_allclose(cos, scale * np.cos(angles), atol=3e-7)
    np.testing.assert_allclose(sin, scale * np.sin(angles), atol=3e-7)


def test_max_len_must_be_positive() -> None:
    with pytest.raises(ValueError, match="max_len must be at least 1, got 0"):
        model_rotary(config(), 0)


def test_configs_are_static_arguments() -> None:
    assert hash(yarn()) == hash(dataclasses.replace(yarn()))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("dynamic", {"factor": 2.0}),
        (
            "longrope",
            {
                "short_factor": (1.0,) * (HEAD_DIM // 2),
                "long_factor": (4.0,) * (HEAD_DIM // 2),
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_capacities_with_the_same_frequencies_are_known(kind: str, given: dict) -> None:
    """``generate`` rounds a capacity up only where that changes no frequency."""
    model = config(kind, **given)
    trained = given.get("original_max_position_embeddings", model.max_position_embeddings)
    pairs = [(trained - 3, trained), (trained, trained + 1), (trained + 1, trained + 9)]
    for one, other in pairs:
        equal = np.array_equal(frequencies(model, one), frequencies(model, other))
        assert model.same_rotary(one, other) == equal


SHORT = 16
"""Tokens up to which the models below have their short factors, or are not scaled."""
GIVEN = {
    "longrope": {
        "short_factor": (1.0,) * 4, "long_factor": (4.0,) * 4,
        "original_max_position_embeddings": SHORT,
    },
    "dynamic": {"factor": 2.0},
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(1, 61, (2, 14)).astype(np.int32)
REAL = np.array([14, 9], np.int32)
TEXTS = [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]


def scaled(kind: str) -> kvjax.LanguageModel:
    rope = RopeConfig(kind, parameters=tuple(sorted(GIVEN[kind].items())))
    return small(rope=rope, max_position_embeddings=SHORT)


@pytest.mark.slow(but=("longrope-16",))
@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("longrope", None), ("longrope", SHORT), ("dynamic", SHORT)]
    + [pytest.param(kind, 40, marks=pytest.mark.rare) for kind in GIVEN]
    + [pytest.param("dynamic", None, marks=pytest.mark.rare)],
)  # fmt: skip
def test_a_cache_turns_by_the_length_that_was_chosen(kind: str, chosen: int | None) -> None:
    """As the pass without a cache of that length does: ragged, and in chunks."""
    lm = scaled(kind)
    apply = jax.jit(lm.apply, static_argnames="max_len")
    wanted = np.asarray(apply(lm.params, TOKENS, lengths=REAL, max_len=chosen or 64))
    others = np.asarray(apply(lm.params, TOKENS, lengths=REAL, max_len=16 if chosen != 16 else 64))
    cache = kvjax.init_cache(lm.config, batch=2, max_len=64, rotary_len=chosen)
    found = []
    for start, end in ((0, 7), (7, 14)):
        real = np.clip(REAL - start, 0, end - start)
        logits, cache = apply(lm.params, TOKENS[:, start:end], cache, lengths=real)
        found.append(logits)
    kvjax.check(cache)
    for row, real in enumerate(REAL):
        each = np.concatenate(found, axis=1)[row, :real]
        np.testing.assert_allclose(each, wanted[row, :real], atol=1e-5)
        assert np.abs(each - others[row, :real]).max() > 0.1
    # Those of 40 are those of 64, where there are two kinds of factors.
    other = chosen is not None and (kind == "dynamic" or chosen == SHORT)
    assert cache.max_len == (chosen if other else 64) == cache.layers[0].keys.shape[2]


@pytest.mark.parametrize("kind", ["longrope", pytest.param("dynamic", marks=pytest.mark.rare)])
def test_texts_end_where_frequencies_would_change(kind: str) -> None:
    lm = scaled(kind)
    cache = kvjax.init_cache(lm.config, "dynamic", batch=2, rotary_len=SHORT)
    assert kvjax.init_cache(lm.config, "dynamic", max_len=32, rotary_len=SHORT).grows_to == SHORT
    cache = kvjax.grow(cache, SHORT)
    with pytest.raises(
        ValueError, match="grow to 17: its keys are rotated for sequences of rotary_len"
    ):
        kvjax.grow(cache, SHORT + 1)
    with pytest.raises(
        ValueError, match="max_len is 17, but its keys are rotated for sequences of"
    ):
        kvjax.convert(cache, "static", max_len=SHORT + 1)
    apply = jax.jit(lm.apply)
    cache = kvjax.init_cache(lm.config, batch=2, max_len=64, rotary_len=SHORT)
    for _ in range(2):
        _, cache = apply(lm.params, TOKENS[:, :9], cache)
    with pytest.raises(kvjax.CacheOverflowError, match="start with a larger rotary_len"):
        kvjax.check(cache)
    with pytest.raises(ValueError, match="the same max_len or rotary_len"):
        kvjax.concatenate([cache, kvjax.init_cache(lm.config, batch=2, max_len=64)])
    # Who has no longer texts keeps all of the room.
    assert kvjax.init_cache(lm.config, max_len=64, rotary_len=64).max_len == 64
    ring = kvjax.CachePolicy(Ring(8))
    assert kvjax.init_cache(lm.config, ring, rotary_len=SHORT).max_len > 1000
    assert kvjax.init_cache(small().config, max_len=64, rotary_len=SHORT).max_len == 64
    with pytest.raises(ValueError, match="rotary_len must be"):
        kvjax.init_cache(lm.config, max_len=64, rotary_len=0)


@pytest.mark.slow
def test_generations_go_by_the_length_that_was_chosen() -> None:
    lm, given = scaled("longrope"), {"max_new_tokens": 5, "eos_token_ids": ()}
    settings: dict[str, Any] = {"rotary_len": SHORT, **given}
    found = kvjax.generate(lm, TEXTS, max_len=64, **settings)
    assert found.tokens == kvjax.generate(lm, TEXTS, use_cache=False, **settings).tokens
    assert found.tokens != kvjax.generate(lm, TEXTS, use_cache=False, rotary_len=64, **given).tokens
    for more, words in (
        ({"use_cache": False}, "need 27 positions, but rotary_len is 16"),
        ({}, "need 27 positions, but its keys are rotated for sequences of rotary_len=16"),
        ({"cache": found.cache}, "rotary_len is 16, but the keys of a given cache or prefix_cache"),
    ):
        with pytest.raises(ValueError, match=words):
            kvjax.generate(lm, [[1] * 8] * 2, **settings | more | {"max_new_tokens": 20})


@pytest.mark.rare
def test_engines_and_programs_go_by_the_length_that_was_chosen(tmp_path: Path) -> None:
    lm, given = scaled("longrope"), {"max_new_tokens": 5, "eos_token_ids": ()}
    short = kvjax.generate(lm, TEXTS, max_len=SHORT, **given).tokens
    long = kvjax.generate(lm, TEXTS, max_len=64, **given).tokens
    assert short != long == kvjax.generate(lm, TEXTS, rotary_len=64, **given).tokens
    kvjax.compile(lm, max_len=64, batch=2, rotary_len=SHORT, eos_token_ids=())
    found = kvjax.generate(lm, TEXTS, max_len=64, rotary_len=SHORT, **given)
    assert found.tokens == short and not found.stats.compilations
    # Rounded up then, so that similar lengths share programs.
    again = kvjax.generate(lm, TEXTS, rotary_len=SHORT, **given)
    assert again.tokens == short and not again.stats.compilations
    cache, _ = kvjax.prefill(lm, TEXTS, max_len=64, rotary_len=SHORT)
    assert cache.rotary_len == SHORT
    paged = kvjax.policy("paged", page_size=16)
    engine = kvjax.Engine(
        lm,
        paged,
        InferenceLimits(2, max_seq_len=64),
        prefill_chunk=16,
        rotary_len=SHORT,
    )
    assert [each.tokens for each in engine.run(TEXTS, **given)] == short
    with pytest.raises(ValueError, match="need 27 positions, but the engine's rotary_len is 16"):
        engine.submit([1] * 8, max_new_tokens=20)
    tree = kvjax.PrefixTree(lm, paged, pages=8, max_len=64, prefill_chunk=16, rotary_len=SHORT)
    assert kvjax.generate(lm, TEXTS, prefix_cache=tree, **given).tokens == short
    tree.save(tmp_path / "tree", lm)
    assert kvjax.PrefixTree.load(tmp_path / "tree", lm).settings["rotary_len"] == SHORT
