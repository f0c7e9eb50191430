"""Log-probabilities: of what is generated, of texts that are given, and what changes logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation import scoring
from kvjax.generation.model import GenerationDefaults
from kvjax.generation.results import Timer
from kvjax.generation.scoring import filtered_log_softmax
from tests.test_prefixes import small

PROMPTS = [[5, 3, 8, 1], [2, 9, 4, 4, 7, 1, 6]]
CONTINUATIONS = [[[4, 4, 2], [7]], [3, 1, 5, 2, 8]]
PAIRS = [(PROMPTS[0], [4, 4, 2]), (PROMPTS[0], [7]), (PROMPTS[1], [3, 1, 5, 2, 8])]


@functools.partial(jax.jit, static_argnums=0)
def uncached(model, params, tokens):
    return model.apply(params, tokens)


def known(lm, prompt, new, params=None):
    """Logits for every token behind a prompt, of the pass without a cache."""
    text = [*prompt, *new]
    tokens = np.zeros((1, 32), np.int32)
    tokens[0, : len(text)] = text
    logits = uncached(lm.architecture, lm.params if params is None else params, tokens)[0]
    return logits[len(prompt) - 1 : len(text) - 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.05}],
)
def test_of_generated_tokens_by_either_distribution(lm, settings):
    found = kvjax.generate(
        lm, PROMPTS, max_new_tokens=6, logprobs=True, padded=True, seed=3, **settings
    )
    assert found.tokens.shape == found.logprobs.logprobs.shape == (2, 6)
    assert found.lengths.tolist() == [6, 6] and found.logprobs.top_ids.shape == (2, 6, 0)
    for row, prompt in enumerate(PROMPTS):
        logits = known(lm, prompt, found.tokens[row])
        own = np.asarray(jax.nn.log_softmax(logits))[range(6), found.tokens[row]]
        np.testing.assert_allclose(found.logprobs.logprobs[row], own, atol=1e-5)
        if not settings:
            assert (found.logprobs.sampling_logprobs == 0).all()  # the likeliest was taken
            continue
        warm = np.asarray(logits, np.float64) / settings["temperature"]
        kept = np.ones_like(warm, bool)
        if "top_k" in settings:
            kept &= warm >= np.sort(warm, axis=1)[:, -20][:, None]
            chances = np.where(kept, np.exp(warm), 0)
            chances /= chances.sum(axis=1, keepdims=True)
            above = np.array([[row[row > x].sum() for x in row] for row in chances])
            kept &= above < 0.9
        else:
            kept &= warm >= warm.max(axis=1, keepdims=True) + np.log(0.05)
        warm = np.where(kept, warm, -np.inf)
        drawn = warm - np.log(np.exp(warm).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(
            found.logprobs.sampling_logprobs[row], drawn[range(6), found.tokens[row]], atol=1e-5
        )


def test_a_padded_result_has_the_lists_in_arrays(lm):
    given = {"max_new_tokens": 5, "eos_token_ids": None, "logprobs": 2}
    lists = kvjax.generate(lm, PROMPTS, **given)
    ends = lists.tokens[0][2]
    lists = kvjax.generate(lm, PROMPTS, **{**given, "eos_token_ids": ends})
    arrays = kvjax.generate(lm, PROMPTS, padded=True, **{**given, "eos_token_ids": ends})
    assert arrays.lengths.tolist() == [len(row) for row in lists.tokens] and arrays.lengths[0] < 5
    for row, (ids, told) in enumerate(zip(lists.tokens, lists.logprobs, strict=True)):
        real = len(ids)
        assert arrays.tokens[row].tolist() == ids + [0] * (5 - real)
        scores = arrays.logprobs
        assert np.allclose(scores.logprobs[row, :real], [each.logprob for each in told])
        likeliest = [[*zip(*each.top_logprobs, strict=True)] for each in told]
        assert scores.top_ids[row, :real].tolist() == [list(ids) for ids, _ in likeliest]
        assert (
            not scores.logprobs[row, real:].any() and not scores.sampling_logprobs[row, real:].any()
        )
    assert lists.lengths is None
    with pytest.raises(ValueError, match="padded must be True or False, got 3"):
        kvjax.generate(lm, PROMPTS, padded=3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 2, "early_stopping": True}, {"temperature": 1.0, "best_of": 2}],
)
def test_arrays_are_padded_with_the_pad_token(lm, settings):
    lm = dataclasses.replace(lm, generation=GenerationDefaults(pad_token_id=7))
    tokens = kvjax.generate(lm, PROMPTS, max_new_tokens=5, **settings).tokens
    arrays = kvjax.generate(
        lm, PROMPTS, max_new_tokens=5, padded=True, eos_token_ids=tokens[0], **settings
    )
    assert arrays.lengths.min() < 5
    for row, length in zip(arrays.tokens, arrays.lengths, strict=True):
        assert row[length:].tolist() == [7] * (5 - length)


@pytest.fixture(scope="module")
def lm():
    return small()


@pytest.mark.parametrize("chunk", [512, pytest.param(2, marks=pytest.mark.rare)])
def test_of_given_texts(lm, chunk):
    given = {"temperature": 0.8, "top_k": 20}
    found = kvjax.score(lm, PROMPTS, CONTINUATIONS, prefill_chunk=chunk, **given)
    assert found.lengths.tolist() == [3, 1, 5] and found.tokens.shape == (3, 5)
    for row, (prompt, new) in enumerate(PAIRS):
        logits = np.asarray(known(lm, prompt, new))
        own = np.asarray(jax.nn.log_softmax(logits))[range(len(new)), new]
        np.testing.assert_allclose(found.logprobs[row, : len(new)], own, atol=1e-5)
        warm = logits / 0.8
        warm = np.where(warm >= np.sort(warm, axis=1)[:, -20][:, None], warm, -np.inf)
        drawn = np.asarray(jax.nn.log_softmax(warm))[range(len(new)), new]
        np.testing.assert_allclose(found.sampling_logprobs[row, : len(new)], drawn, atol=1e-5)
        assert not found.logprobs[row, len(new) :].any()
        assert abs(found.totals[row] - own.sum()) < 1e-4


@pytest.mark.rare
def test_a_text_and_its_own_continuation_are_words_too(tiny_llama):
    """One prompt, one continuation, as texts."""
    if tiny_llama.tokenizer is None:
        pytest.skip("the tiny model has no tokenizer")
    found = kvjax.score(tiny_llama, "ab", ["cde"])
    ids = tiny_llama.tokenizer.encode("cde", add_special_tokens=False)
    assert found.tokens.tolist() == [ids]


@pytest.mark.rare
def test_a_lossy_cache_scores_as_it_generates(lm):
    policy = kvjax.policy(bits=8, block=8)
    made = kvjax.generate(lm, PROMPTS, max_new_tokens=6, logprobs=0, cache=policy, temperature=1.0)
    found = kvjax.score(lm, PROMPTS, made.tokens, cache=policy)
    wanted = [[each.logprob for each in row] for row in made.logprobs]
    np.testing.assert_allclose(found.logprobs, wanted, atol=1e-5)


@pytest.mark.rare
def test_gradients_of_scores(lm):
    """Against finite differences, and those of the pass without a cache; inside jit the same."""

    def total(params):
        found = kvjax.score(lm.with_params(params), PROMPTS, CONTINUATIONS, temperature=0.9)
        return found.totals.sum() + found.sampling_logprobs.sum()

    def wanted_of(params):
        found = 0.0
        for prompt, new in PAIRS:
            logits = known(lm, prompt, new, params)
            for scale in (1.0, 0.9):
                each = jax.nn.log_softmax(logits / scale)
                found += each[np.arange(len(new)), np.array(new)].sum()
        return found

    found, wanted = jax.jit(jax.grad(total))(lm.params), jax.grad(wanted_of)(lm.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-4), found, wanted)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(found))))
    way = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape), lm.params)
    slope = sum(jax.tree.leaves(jax.tree.map(lambda x, y: (x * y).sum(), found, way)))

    compiled = jax.jit(total)

    def at(step):
        return compiled(jax.tree.map(lambda x, y: x + step * y, lm.params, way))

    eps = 1e-3
    difference = (8 * (at(eps) - at(-eps)) - (at(2 * eps) - at(-2 * eps))) / (12 * eps)
    assert abs(difference - slope) < 2e-2 * abs(slope)


def test_a_prompt_is_read_once_for_all_of_its_continuations(lm):
    seen = []

    class Counting:
        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

        def apply(self, params, tokens, *args, **options):
            seen.append(tokens.shape)
            return self.model.apply(params, tokens, *args, **options)

    counted = dataclasses.replace(lm, architecture=Counting(lm.architecture))
    kvjax.score(counted, PROMPTS[:1], [[[1, 2], [3, 4], [5, 6]]])
    assert seen == [(1, 16), (3, 16)]


@pytest.mark.slow
def test_prefill_gives_a_cache_and_what_follows(lm):
    cache, logits = kvjax.prefill(lm, PROMPTS, cache="dynamic", prefill_chunk=4)
    assert cache.length.tolist() == [4, 7]
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(logits[row], known(lm, prompt, [0])[0], atol=1e-5)
    tokens = np.argmax(logits, axis=-1)[:, None].tolist()
    rest = kvjax.generate(lm, tokens, cache=cache, max_new_tokens=4).tokens
    whole = kvjax.generate(lm, PROMPTS, max_new_tokens=5).tokens
    assert [a + b for a, b in zip(tokens, rest, strict=True)] == whole


WRONG = {
    "too few": ((PROMPTS, [[1]]), "2 prompts, but 1 entries"),
    "none": ((PROMPTS, [[[1]], []]), "prompt 1 has no continuations"),
    "an empty one": ((PROMPTS, [[[1], []], [2]]), "of prompt 0 continuation 1 is empty"),
    "no token": ((PROMPTS, [[1], [999]]), "token id 999 is out of range"),
}


def test_rows_of_arrays_are_continuations(lm):
    rows = np.array([[4, 4, 2], [7, 1, 2]])
    found = kvjax.score(lm, PROMPTS[:1], [rows])
    assert found.tokens.tolist() == rows.tolist()
    ragged = kvjax.score(lm, PROMPTS[:1], [[rows[0], rows[1][:1]]])
    np.testing.assert_allclose(ragged.logprobs[0], found.logprobs[0], atol=1e-6)


def test_a_score_writes_its_cache_where_it_is(lm):
    """But for what a derivative needs of it."""
    cache = kvjax.init_cache(lm.config, batch=1, max_len=64)
    given = lm.architecture, lm.params, np.zeros((1, 16), np.int32), cache, np.array([4]), True
    memory = scoring._donating_call.lower(*given).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(kvjax.nbytes(cache).values())
    kvjax.score(lm, PROMPTS, CONTINUATIONS)
    with (meter := Timer()).running():
        kvjax.score(lm, PROMPTS, CONTINUATIONS)
    assert meter.compilations == 0


@pytest.mark.parametrize("name", WRONG)
def test_wrong_continuations_are_told(lm, name):
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        kvjax.score(lm, *given)


def no_repeats(logits, tokens, length):
    """A hook: no token again that is among the row's last two."""
    rows = jnp.arange(logits.shape[0])
    for back in (1, 2):
        last = tokens[rows, jnp.maximum(length - back, 0)]
        logits = logits.at[rows, last].set(-jnp.inf)
    return logits


@pytest.mark.parametrize(
    "choice", ["static", *(pytest.param(x, marks=pytest.mark.rare) for x in ("dynamic", None))]
)
def test_a_hook_on_the_logits_knows_the_rows_tokens(lm, choice):
    given = {"max_new_tokens": 12, "logits_hook": no_repeats, "logprobs": 0}
    given |= {"use_cache": False} if choice is None else {"cache": choice}
    found = kvjax.generate(lm, PROMPTS, **given)
    for prompt, new, told in zip(PROMPTS, found.tokens, found.logprobs, strict=True):
        text, wanted = list(prompt), []
        for _ in new:
            logits = np.array(known(lm, text, [0])[0])
            own = logits - np.log(np.sum(np.exp(logits)))
            logits[text[-2:]] = -np.inf
            wanted.append(int(np.argmax(logits)))
            text.append(wanted[-1])
            assert abs(told[len(wanted) - 1].logprob - own[wanted[-1]]) < 1e-5
        assert new == wanted
    assert found.tokens != kvjax.generate(lm, PROMPTS, max_new_tokens=12).tokens


@pytest.mark.rare
def test_a_hook_is_traced_once_and_compiled_ahead(lm):
    traced = []

    def hook(logits, tokens, length):
        traced.append(tokens.shape)
        return logits

    given = {"logits_hook": hook, "max_len": 48}
    kvjax.compile(lm, "static", batch=2, **given)
    programs = len(traced)
    with (meter := Timer()).running():
        found = kvjax.generate(lm, PROMPTS, max_new_tokens=9, cache="static", **given)
    assert meter.compilations == 0 and len(traced) == programs and set(traced) == {(2, 48)}
    assert found.tokens == kvjax.generate(lm, PROMPTS, max_new_tokens=9).tokens
    with pytest.raises(kvjax.NonFiniteError):
        kvjax.generate(lm, PROMPTS, logits_hook=lambda logits, tokens, length: logits - jnp.inf)

    def only_five(logits, tokens, length):
        return jnp.full_like(logits, -jnp.inf).at[:, 5].set(0.0)

    # What it forbids is not drawn, though another filter forbids the rest.
    given = {"logits_hook": only_five, "temperature": 1.0, "max_new_tokens": 4}
    assert kvjax.generate(lm, PROMPTS, **given).tokens == [[5] * 4] * 2
    with pytest.raises(kvjax.NonFiniteError):
        kvjax.generate(lm, PROMPTS, eos_token_ids=5, min_new_tokens=3, **given)
    for wrong, words in (
        ("no function", "must be a hashable function"),
        (lambda x, y, z: x[0], "got float"),
    ):
        with pytest.raises(ValueError, match=words):
            kvjax.generate(lm, PROMPTS, logits_hook=wrong)


def test_filters_that_leave_one_token_leave_it_for_certain():
    from kvjax.sampling.params import prepare_sampling

    logits = jnp.asarray([[0.0, 3.0, 1.0]])
    filters, settings = prepare_sampling(seeds=[0], temperature=0.0)
    assert filtered_log_softmax(logits, filters, settings).tolist() == [[-np.inf, 0.0, -np.inf]]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (([[99]], [[1]]), "prompts"),
        (([[]], [[1]]), "prompts"),
        (([[1.5]], [[1]]), "prompts"),
        (([[1]], [[99]]), "continuations"),
        (([[1]], [5]), "continuations"),
        (([[1]], [[]]), "continuations"),
        (([[1]], []), "continuations"),
    ],
)
def test_errors_name_the_argument(lm, arguments, param):
    """Also where the message names one entry of it."""
    with pytest.raises(kvjax.ArgumentError) as error:
        kvjax.score(lm, *arguments)
    assert error.value.param == param
