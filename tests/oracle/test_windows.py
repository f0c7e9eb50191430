"""Layers with windows, and the Gemma family, give Transformers' logits in whatever holds them.

Float32, within 1e-5 of the largest |logit|. The reference is eager attention, each prompt alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.layouts import Growing
from tests.oracle.conftest import AS_USERS_COMPILE, randomise

TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 0.04
MATTERS = 1e-2
"""What a setting must move the reference's logits by, as a part of the largest, to be tested."""
WINDOW = 12
PROMPTS = (7, 12, 36)
"""Shorter than a window, as long, and three times as long."""
MORE = 4
"""Tokens that every row is given after its prompt."""
CHUNKS = (11, 5, 1, 1, 5)

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
}
BASES = {"rope_theta": 3e3, "rope_local_base_freq": 40.0}
LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **full},
            "sliding_attention": {"rope_type": "default", **sliding},
        }
    }


# A model type, its fields, what its weights are multiplied by, and changes that must matter.
CASES: dict[str, tuple[str, dict[str, Any], float, list[dict[str, Any]]]] = {
    "mistral": ("mistral", SMALL, 1.0, [{"sliding_window": 99}]),
    "gemma2": (
        "gemma2",
        {**SMALL, "query_pre_attn_scalar": 3},
        1.0,
        [
            {"sliding_window": 99},
            {"query_pre_attn_scalar": 8},
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
        ],
    ),
    "gemma2-capped": (
        "gemma2",
        {**SMALL, "query_pre_attn_scalar": 20, "num_key_value_heads": 1, "attention_bias": True},
        6.0,
        [
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
            {"attn_logit_softcapping": 40.0},
            {"final_logit_softcapping": 25.0},
        ],
    ),
    "gemma3_text": (
        "gemma3_text",
        {**SMALL, **BASES, **LINEAR, "sliding_window_pattern": 3, "query_pre_attn_scalar": 5},
        1.0,
        [
            {"sliding_window": 99},
            {"query_pre_attn_scalar": 8},
            ropes({"rope_theta": 3e3}, {"rope_theta": 40.0}),
            ropes({"rope_theta": 40.0, **LINEAR["rope_scaling"]}, {"rope_theta": 40.0}),
            ropes(
                {"rope_theta": 3e3, **LINEAR["rope_scaling"]},
                {"rope_theta": 3e3, **LINEAR["rope_scaling"]},
            ),
            {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
        ],
    ),
    "gemma3_text-other": (
        "gemma3_text",
        {
            **SMALL,
            **ropes(
                {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
                 "rope_theta": 3e3},
                {"rope_type": "linear", "factor": 2.0, "rope_theta": 40.0},
            ),
            "layer_types": ["full_attention", "sliding_attention", "full_attention",
                            "sliding_attention"],
            "final_logit_softcapping": 4.0,
            "tie_word_embeddings": False,
            "hidden_activation": "silu",
        },
        1.0,
        [{"final_logit_softcapping": None}],
    ),
}  # fmt: skip


class Case:
    """A checkpoint here and in Transformers, and a row of tokens for each prompt."""

    def __init__(self, folder: Path, torch: Any, transformers: Any):
        self.folder, self._torch, self._transformers = folder, torch, transformers
        self.lm = models.load(folder, dtype="float32")
        self.step = jax.jit(self.lm.apply)
        size = (len(PROMPTS), max(PROMPTS) + MORE)
        self.tokens = np.random.default_rng(1).integers(0, 67, size).astype(np.int32)
        self.logits = self.reference()

    def reference(self, dtype: str = "float32", **changes: Any) -> list[np.ndarray]:
        """Each row alone through Transformers, up to the tokens that it is given in the end."""
        model = self._transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, attn_implementation="eager", **changes
        ).eval()
        assert model.config._attn_implementation == "eager"
        rows = []
        with self._torch.no_grad():
            for row, prompt in zip(self.tokens, PROMPTS, strict=True):
                ids = self._torch.tensor(row[None, : prompt + MORE], dtype=self._torch.long)
                rows.append(model(ids).logits[0].float().numpy())
        return rows

    def feed(self, policy: Any, calls: list[np.ndarray]) -> list[np.ndarray]:
        """Logits of every token, a row, through a cache; ``calls``: tokens a row, of each call."""
        rows, total = self.tokens.shape
        cache = kvjax.init_cache(self.lm.config, policy, batch=rows, max_len=total)
        held = np.zeros(rows, np.int32)
        parts: list[list[np.ndarray]] = [[] for _ in range(rows)]
        for counts in calls:
            if cache.grows_to is not None and max(held + counts) > cache.max_len:
                cache = kvjax.grow(cache, min(2 * cache.max_len, total))
            # What stands behind a row's own tokens is not to be seen: the others' tokens.
            chunk = np.full((rows, max(counts)), 5, np.int32)
            for row, count in enumerate(counts):
                chunk[row, :count] = self.tokens[row, held[row] : held[row] + count]
            logits, cache = self.step(self.lm.params, chunk, cache, lengths=counts)
            for row, count in enumerate(counts):
                parts[row].append(np.asarray(logits)[row, :count])
            held = held + counts
        kvjax.check(cache)
        assert np.array_equal(np.asarray(cache.length), held)
        return [np.concatenate(part) for part in parts]


@pytest.fixture(scope="module", params=list(CASES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def make(torch: Any, transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable:
    def make(model_type: str, fields: dict[str, Any], large: float) -> Case:
        config = transformers.AutoConfig.for_model(model_type, **fields)
        model = randomise(transformers.AutoModelForCausalLM.from_config(config), torch)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" not in parameter_name:
                    parameter.mul_(large)
        folder = tmp_path_factory.mktemp(model_type)
        model.save_pretrained(folder)
        return Case(folder, torch, transformers)

    return make


@pytest.fixture(scope="module")
def made() -> dict[str, Case]:
    """The cases that a test has used, by name."""
    return {}


@pytest.fixture
def case(name: str, make: Callable, made: dict[str, Case]) -> Case:
    if name not in made:
        made[name] = make(*CASES[name][:3])
    return made[name]


def worst(logits: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """The largest difference in any row, as a part of the largest |logit| of the row."""
    return max(
        float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
        for ours, theirs in zip(logits, reference, strict=True)
    )


def test_every_setting_matters(name: str, case: Case) -> None:
    for changes in CASES[name][3]:
        assert worst(case.reference(**changes), case.logits) > MATTERS, changes


def test_uncached(case: Case) -> None:
    for row, prompt in enumerate(PROMPTS):
        logits = np.asarray(case.step(case.lm.params, case.tokens[row : row + 1, :prompt]))[0]
        assert worst([logits], [case.logits[row][:prompt]]) <= TOLERANCE


def policy_of(preset: str, name: str) -> Any:
    if preset == "dynamic":  # small enough that it must grow
        return kvjax.CachePolicy(Growing(16))
    if preset == "sliding_window" and name != "mistral":  # some layers have no window of their own
        return kvjax.policy("sliding_window", window=max(PROMPTS) + MORE)
    return kvjax.policy(preset)


def steps(first: tuple[int, ...]) -> list[np.ndarray]:
    """Tokens a row of each call: prompts in parts of these sizes and ones, then ones for all."""
    calls, start = [], 0
    for size in (*first, *[1] * max(PROMPTS)):
        if start < max(PROMPTS):
            calls.append(np.clip(np.array(PROMPTS) - start, 0, size).astype(np.int32))
        start += size
    return calls + [np.ones(len(PROMPTS), np.int32)] * MORE


@pytest.mark.parametrize("preset", ["static", "dynamic", "hybrid", "sliding_window"])
def test_ragged_batch_in_uneven_chunks(case: Case, name: str, preset: str) -> None:
    logits = case.feed(policy_of(preset, name), steps(CHUNKS))
    assert worst(logits, case.logits) <= TOLERANCE


@pytest.mark.parametrize("preset", ["hybrid", "sliding_window"])
def test_a_prompt_at_once_overruns_its_ring(case: Case, name: str, preset: str) -> None:
    """Three windows in one call, which rings shorter than that take in parts."""
    logits = case.feed(policy_of(preset, name), steps(PROMPTS[-1:]))
    assert worst(logits, case.logits) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_bfloat16(model_type: str, make: Callable) -> None:
    case = make(model_type, {**SMALL, "query_pre_attn_scalar": 8}, 1.0)
    theirs = case.reference("bfloat16")
    case.lm = models.load(case.folder, dtype="bfloat16")
    case.step = jax.jit(case.lm.apply)
    assert {leaf.dtype for leaf in jax.tree.leaves(case.lm.params)} == {jnp.dtype("bfloat16")}
    ours = case.feed(kvjax.policy("hybrid"), steps(CHUNKS))
    assert worst(ours, theirs) <= BFLOAT16_TOLERANCE
    assert worst(ours, case.logits) <= BFLOAT16_TOLERANCE


def test_the_embeddings_scale_is_rounded(make: Callable) -> None:
    """With norms that do not norm, logits grow with the scale: 3.46875 in bfloat16, not 3.4641."""
    fields = {**SMALL, "hidden_size": 12, "rms_norm_eps": 1e12, "num_hidden_layers": 1}
    case = make("gemma2", fields, 1.0)
    lm = models.load(case.folder, dtype="bfloat16")
    ours, theirs, wide = (
        np.concatenate(logits).ravel()
        for logits in (
            [
                np.asarray(lm.apply(lm.params, row[None, : prompt + MORE]))[0]
                for row, prompt in zip(case.tokens, PROMPTS, strict=True)
            ],
            case.reference("bfloat16"),
            case.logits,
        )
    )
    assert ours @ wide / (wide @ wide) == pytest.approx(3.46875 / 12**0.5, abs=4e-4)
    assert ours @ theirs / (theirs @ theirs) == pytest.approx(1, abs=4e-4)


@pytest.mark.parametrize("name", ["gemma2-capped", "gemma3_text"], scope="module")
def test_gradients(case: Case) -> None:
    """The training pass without a cache, and the same through one, have the same gradients."""
    tokens = jnp.asarray(case.tokens[:, :20])

    def loss(params: Any, cache: Any) -> Any:
        out = case.lm.apply(params, tokens, cache)
        logits = out if cache is None else out[0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    cache = kvjax.init_cache(case.lm.config, kvjax.policy("hybrid", slack=19), batch=3, max_len=99)
    gradient = jax.jit(jax.grad(loss), compiler_options=AS_USERS_COMPILE)
    plain, cached = (gradient(case.lm.params, c) for c in (None, cache))
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(cached), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max(), rtol=1e-4)
