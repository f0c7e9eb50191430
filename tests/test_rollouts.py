"""Rollouts: one program, whose parameters change in every step."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvjax
from kvjax.generation.results import Timer
from kvjax.layouts import Paged, Ring
from kvjax.models.config import RopeConfig
from kvjax.rollouts import program as rollout_program
from tests.alive import alive
from tests.matrix import tiny_model
from tests.test_prefixes import small

PROMPTS = [[5, 3, 8, 1], [2, 9, 4, 4, 7, 1, 6]]
TOKENS = np.array([[5, 3, 8, 1, 0, 0, 0, 0], [2, 9, 4, 4, 7, 1, 6, 0]], np.int32)
LENGTHS = np.array([4, 7], np.int32)
POLICIES = {
    "static": "static", "dynamic": "dynamic", "paged": kvjax.CachePolicy(Paged(16)),
    "int8": kvjax.policy(bits=8, block=8),
    "ring and sinks": kvjax.CachePolicy(Ring(8, sinks=2, slack=15)),
    "host": kvjax.CachePolicy(placement=kvjax.Host(), block=8),
}  # fmt: skip


@pytest.fixture(scope="module")
def lm():
    return small()


def lists(found):
    return [row[:real].tolist() for row, real in zip(found.new_tokens, found.lengths, strict=True)]


@pytest.mark.parametrize(
    "policy",
    [name if name == "static" else pytest.param(name, marks=pytest.mark.rare)
     for name in POLICIES],
)  # fmt: skip
def test_rows_are_those_of_generate(lm, policy):
    given = {
        "n": 3,
        "max_new_tokens": 9,
        "temperature": 0.9,
        "top_p": 0.95,
        "eos_token_ids": range(0, 61, 7),
    }
    given |= {"cache": POLICIES[policy], "repetition_penalty": 1.1, "min_new_tokens": 2}
    given |= {"frequency_penalty": 0.5, "no_repeat_ngram_size": 2, "typical_p": 0.9}
    found = kvjax.rollout(lm, lm.params, PROMPTS, seed=5, **given).check()
    wanted = kvjax.generate(lm, PROMPTS, seed=5 * 2**32, logprobs=True, padded=True, **given)
    assert found.lengths.tolist() == wanted.lengths.tolist()
    assert lists(found) == [row[:real].tolist() for row, real in
                            zip(wanted.tokens, wanted.lengths, strict=True)]  # fmt: skip
    assert found.finish_reasons == wanted.stats.finish_reasons and "eos" in found.finish_reasons
    np.testing.assert_allclose(found.logprobs, wanted.logprobs.logprobs, atol=1e-6)
    np.testing.assert_allclose(
        found.sampling_logprobs, wanted.logprobs.sampling_logprobs, atol=1e-6
    )
    for row, (tokens, real) in enumerate(zip(found.tokens, found.lengths, strict=True)):
        prompt = PROMPTS[row // 3]
        new = slice(len(prompt), len(prompt) + int(real))
        assert tokens[: len(prompt)].tolist() == prompt and not tokens[new.stop :].any()
        assert tokens[new].tolist() == lists(found)[row]
        assert np.flatnonzero(found.mask[row]).tolist() == list(range(*new.indices(99)))
    kvjax.check(found.cache)
    assert found.cache.length.tolist() == [
        len(PROMPTS[row // 3]) + int(real) - 1 for row, real in enumerate(found.lengths)
    ]


def trainer(architecture, params, found, temperature=1.0):
    """Log-probabilities of the new tokens as a training step computes them, aligned with tokens."""
    logits = architecture.apply(params, found.tokens)[:, :-1].astype(jnp.float32) / temperature
    known = jax.nn.log_softmax(logits)
    each = jnp.take_along_axis(known, found.tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.where(found.mask[:, 1:], each, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-4), pytest.param("bfloat16", 0.1, marks=pytest.mark.rare)],
)
def test_drawn_log_probabilities_are_the_trainers(dtype, tolerance):
    """Sampler and trainer agree up to rounding; in other stacks they often don't."""
    model, params = tiny_model(dtype=dtype)
    lm = dataclasses.replace(small(), config=model.config, params=params, architecture=model)
    found = kvjax.rollout(lm, params, PROMPTS, n=4, max_new_tokens=24, temperature=0.8)
    wanted = trainer(model, params, found, 0.8)
    mean = (
        jnp.sum(jnp.abs(found.align(found.sampling_logprobs)[:, 1:] - wanted)) / found.lengths.sum()
    )
    np.testing.assert_allclose(found.align(found.sampling_logprobs)[:, 1:], wanted, atol=tolerance)
    assert mean < tolerance / 10
    own = trainer(model, params, found)
    np.testing.assert_allclose(found.align(found.logprobs)[:, 1:], own, atol=tolerance)


@pytest.mark.slow
def test_ten_steps_of_an_optimizer_compile_once_and_copy_no_parameters(lm):
    optimizer = optax.sgd(1e-2)

    @jax.jit
    def train(params, state, found):
        def loss(params):
            return -jnp.mean(trainer(lm.architecture, params, found))

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params, state, buffer, texts = lm.params, optimizer.init(lm.params), None, []
    size = max(x.nbytes for x in jax.tree.leaves(params))
    before = rollout_program._rollout._cache_size()
    for step in range(10):
        if step == 1:
            (meter := Timer()).running().__enter__()
        if step == 2:
            held = len(alive())
        found = kvjax.rollout(
            lm, params, (TOKENS, LENGTHS), n=2, max_new_tokens=8, seed=step, buffer=buffer
        )
        buffer = found.cache
        texts.append(lists(found))
        params, state = train(params, state, found)
    assert meter.compilations == 0 and len(alive()) <= held
    assert rollout_program._rollout._cache_size() - before == 1  # although the first had no buffer
    assert len({str(each) for each in texts}) == 10
    program = lowered(lm, buffer)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(kvjax.nbytes(buffer).values())
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < size


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", ["weak", pytest.param("split", marks=pytest.mark.rare)]
)  # fmt: skip
def test_the_parameters_of_the_first_step_compile_no_program_of_their_own(lm, first):
    """Weakly typed parameters with policies that commit results; parameters of ``nnx.split``."""
    from tests.test_adapters import model

    given, cache = (lm, POLICIES["host"]) if first == "weak" else (model("nnx_model"), "static")
    params = given.params
    if first == "weak":
        params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01), params)
        assert all(x.weak_type for x in jax.tree.leaves(params))

    @jax.jit
    def train(params, drawn):
        return optax.apply_updates(params, jax.tree.map(lambda x: x * drawn.mean(), params))

    before, buffer, compiled = rollout_program._rollout._cache_size(), None, []
    for step in range(3):
        with (meter := Timer()).running():
            found = kvjax.rollout(
                given, params, PROMPTS, max_new_tokens=3, seed=step, cache=cache, buffer=buffer
            )
        compiled.append(meter.compilations)
        buffer, params = found.cache, train(params, found.sampling_logprobs)
    assert compiled[1:] == [0, 0] and rollout_program._rollout._cache_size() - before == 1


def lowered(lm, buffer):
    """The compiled program of a rollout with a buffer."""
    found = {}

    def keep(*given):
        found["program"] = rolled.lower(*given).compile()
        return rolled(*given)

    rolled, rollout_program._rollout = rollout_program._rollout, keep
    try:
        kvjax.rollout(
            lm, lm.params, (TOKENS, LENGTHS), n=2, max_new_tokens=8, seed=99, buffer=buffer
        )
    finally:
        rollout_program._rollout = rolled
    return found["program"]


@pytest.mark.slow
def test_eight_samples_of_a_long_prompt_share_its_prefill():
    """By the compiler's operation count, eight samples need hardly more than one."""
    lm, prompt = small(), (np.ones((1, 1024), np.int32), np.array([1024]))

    def operations(n):
        call = jax.jit(lambda params: kvjax.rollout(lm, params, prompt, n=n, max_new_tokens=2))
        return call.lower(lm.params).compile().cost_analysis()["flops"]

    assert operations(8) < 1.1 * operations(1)


@pytest.mark.slow
def test_inside_jit_with_a_traced_seed(lm):
    @jax.jit
    def step(params, tokens, lengths, seed):
        found = kvjax.rollout(lm, params, (tokens, lengths), n=2, max_new_tokens=5, seed=seed)
        return found.new_tokens, found.sampling_logprobs

    for seed in (0, 7):
        tokens, drawn = step(lm.params, TOKENS, LENGTHS, jnp.uint32(seed))
        wanted = kvjax.rollout(lm, lm.params, PROMPTS, n=2, max_new_tokens=5, seed=seed)
        np.testing.assert_array_equal(tokens, wanted.new_tokens)
        np.testing.assert_allclose(drawn, wanted.sampling_logprobs, atol=1e-5)


@pytest.mark.rare
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.rare)])
def test_on_a_mesh(lm, n):
    spread = lm.on(kvjax.make_mesh(data=2, tensor=2))
    given = {"n": n, "max_new_tokens": 6, "seed": 3}
    found = kvjax.rollout(spread, spread.params, PROMPTS, **given)
    assert len(found.cache.layers[0].keys.sharding.device_set) == 4
    wanted = kvjax.rollout(lm, lm.params, PROMPTS, **given)
    np.testing.assert_array_equal(found.new_tokens, wanted.new_tokens)
    # A trainer's parameters are on other devices, and in a wider dtype.
    other = jax.tree.map(lambda x: x.astype(jnp.float16).astype(jnp.float32), lm.params)
    moved = kvjax.rollout(spread, other, PROMPTS, put=True, **given)
    alone = kvjax.rollout(lm, other, PROMPTS, **given)
    np.testing.assert_array_equal(moved.new_tokens, alone.new_tokens)


@pytest.mark.slow
def test_a_trainers_dtype(lm):
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), lm.params)
    narrow = dataclasses.replace(lm, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), wide))
    given = {"max_new_tokens": 4}
    with pytest.raises(ValueError, match=r"lm\.put"):
        kvjax.rollout(narrow, wide, PROMPTS, **given)
    found = kvjax.rollout(narrow, wide, PROMPTS, put=True, **given)
    by = kvjax.rollout(narrow, wide, PROMPTS, put=narrow.put, **given)
    wanted = kvjax.rollout(narrow, narrow.params, PROMPTS, **given)
    for each in (found, by):
        np.testing.assert_array_equal(each.tokens, wanted.tokens)
    same = lm.put(lm.params)
    old = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(lm.params)}
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(same)} == old  # no copy


@pytest.mark.rare
@pytest.mark.parametrize("real", [10, 15])
def test_pages_are_enough_for_prompts_of_any_length(lm, real):
    """A prompt that ends inside a page shares fewer pages."""
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, :real] = np.arange(1, real + 1)
    given = {"n": 4, "max_new_tokens": 16, "seed": 2}
    paged = POLICIES["paged"]
    found = kvjax.rollout(lm, lm.params, (tokens, np.array([real])), cache=paged, **given).check()
    wanted = kvjax.rollout(lm, lm.params, (tokens, np.array([real])), **given)
    assert lists(found) == lists(wanted)
    few = kvjax.CachePolicy(Paged(16, pages=3))
    with pytest.raises(kvjax.CacheOverflowError):
        kvjax.rollout(lm, lm.params, (tokens, np.array([real])), cache=few, **given).check()


@pytest.mark.rare
def test_frequencies_that_depend_on_the_length_are_those_of_generate():
    scaled = (("factor", 2.0), ("original_max_position_embeddings", 16))
    lm = small(max_position_embeddings=16, rope=RopeConfig("dynamic", parameters=scaled))
    prompts = [list(range(1, 20))]
    found = kvjax.rollout(lm, lm.params, prompts, max_new_tokens=6, seed=0)
    wanted = kvjax.generate(
        lm, prompts, max_new_tokens=6, seed=0, temperature=1.0, logprobs=True, padded=True
    )
    np.testing.assert_allclose(found.logprobs, wanted.logprobs.logprobs, atol=1e-5)


@pytest.mark.rare
def test_traced_prompts_that_are_none_break_their_rows_alone(lm):
    @jax.jit
    def rolled(tokens, lengths):
        found = kvjax.rollout(lm, lm.params, (tokens, lengths), max_new_tokens=5)
        return found.broken, found.new_tokens, found.lengths

    tokens = np.array([[5, 3, 8, 1], [5, 999, 1, 1], [5, 3, 8, 1], [5, 3, 999, 999]], np.int32)
    broken, new, lengths = rolled(tokens, np.array([4, 3, 0, 2]))
    assert broken.tolist() == [False, True, True, False] and lengths.tolist() == [5, 0, 0, 5]
    wanted = kvjax.rollout(lm, lm.params, PROMPTS[:1], max_new_tokens=5)
    assert new[0].tolist() == wanted.new_tokens[0].tolist()
    with pytest.raises(ValueError, match="must be integers, got float"):
        kvjax.rollout(lm, lm.params, (tokens * 1.5, np.array([4] * 4)))


@pytest.mark.rare
def test_texts_up_to_the_models_positions():
    from tests.test_adapters import model

    lm = model("nnx_model")
    prompt = np.random.default_rng(0).integers(1, 97, 200).tolist()
    found = kvjax.rollout(lm, lm.params, [prompt], max_new_tokens=20)
    assert lm.config.position_limit == 256  # the last token needs no position
    assert found.tokens.shape == (1, 257) and found.check().lengths.tolist() == [20]


@pytest.mark.rare
def test_a_model_that_is_made_anew_compiles_nothing():
    """As NNX modules are after a state update. Parameters on other devices are moved."""
    from tests.test_adapters import example

    before = None
    for step in range(3):
        lm = example("nnx_model").language_model(step)
        kvjax.rollout(lm, lm.params, PROMPTS, max_new_tokens=4, seed=step)
        before = rollout_program._rollout._cache_size() if before is None else before
    assert rollout_program._rollout._cache_size() == before
    away = jax.device_put(jax.tree.map(np.asarray, lm.params), jax.devices()[1])
    found = kvjax.rollout(lm, away, PROMPTS, max_new_tokens=4, seed=2, put=True)
    assert {x.devices().pop() for x in jax.tree.leaves(lm.put(away))} == {jax.devices()[0]}
    wanted = kvjax.rollout(lm, lm.params, PROMPTS, max_new_tokens=4, seed=2)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


@pytest.mark.rare
def test_a_stacked_model_rolls_out():
    from tests.test_adapters import model

    lm = model("plain_scan")
    found = kvjax.rollout(lm, lm.params, PROMPTS, n=2, max_new_tokens=6, temperature=20.0)
    wanted = kvjax.generate(lm, PROMPTS, n=2, max_new_tokens=6, temperature=20.0)
    assert found.cache.stacks is not None and lists(found) == wanted.tokens


@pytest.mark.slow
def test_what_is_not_finite_is_told(lm):
    broken = jax.tree.map(lambda x: x * jnp.nan, lm.params)
    found = kvjax.rollout(lm, broken, PROMPTS, max_new_tokens=3)
    assert found.lengths.tolist() == [0, 0] and not found.mask.any()
    with pytest.raises(kvjax.NonFiniteError, match=r"row\(s\) 0, 1"):
        found.check()


def test_a_model_is_saved_and_loaded_as_it_was_trained(tmp_path):
    lm = kvjax.models.load()
    trained = lm.with_params(jax.tree.map(lambda x: x * 1.01, lm.params))
    trained.save(tmp_path / "model")
    again = kvjax.models.load(tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    assert again.config == trained.config and again.generation == trained.generation
    assert again.encode("def f(x):")[0].tolist() == lm.encode("def f(x):")[0].tolist()
    with pytest.raises(ValueError, match="not an empty folder"):
        trained.save(tmp_path / "model")


@pytest.mark.rare
def test_the_page_of_training_loops_runs(capsys):
    page = Path(kvjax.__file__).parents[1] / "docs" / "rollouts.md"
    if not page.is_file():
        pytest.skip("an unpacked wheel has no docs")
    found: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    exec("\n".join(code), found)
    drawn = found["samples"].align(found["samples"].sampling_logprobs)[:, 1:]
    assert drawn.shape == found["trainer_logprobs"].shape and found["cache"].length.tolist()[0] > 1
    assert "(1, 8) [8] (1, 8)" in capsys.readouterr().out
    grads = jax.tree.leaves(found["grads"])
    assert all(jnp.isfinite(x).all() for x in grads) and any(jnp.any(x != 0) for x in grads)


WRONG = {
    "n": ({"n": 0}, "n must be an integer >= 1"),
    "seed": ({"seed": 2**32}, "seed is 4294967296"),
    "auto": ({"cache": kvjax.policy("auto", memory=10**6)}, "moves layers"),
    "lengths": ({"prompts": (TOKENS, np.array([4]))}, "lengths .batch."),
    "an empty prompt": ({"prompts": (TOKENS, np.array([4, 0]))}, "prompt 1 has length 0"),
    "no token": ({"prompts": ([[999]])}, "token id 999"),
    "too few tokens": ({"min_new_tokens": 9}, "min_new_tokens is 9, but max_new_tokens is only 2"),
    "temperature": ({"temperature": -1.0}, "temperature must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told(lm, name):
    given, words = WRONG[name]
    given = {"prompts": PROMPTS, "max_new_tokens": 2, **given}
    with pytest.raises(ValueError, match=words):
        kvjax.rollout(lm, lm.params, given.pop("prompts"), **given)


def test_wrong_parameters_and_buffers_are_told(lm):
    found = kvjax.rollout(lm, lm.params, PROMPTS, max_new_tokens=2)
    with pytest.raises(ValueError, match="does not have this rollout's policy and shapes"):
        kvjax.rollout(lm, lm.params, PROMPTS, n=2, max_new_tokens=2, buffer=found.cache)
    with pytest.raises(ValueError, match="the parameters lack"):
        kvjax.rollout(lm, {}, PROMPTS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_len'"):
        kvjax.rollout(lm, lm.params, PROMPTS, max_len=3)
