"""Beam search, compared with lists of sequences in NumPy; sharing; the best of samples."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.pytree import tree_bytes
from kvjax.generation.beams import programs as beam_programs
from kvjax.generation.beams.step import BeamConfig, SearchConfig, SearchParams, initial_state
from kvjax.generation.beams.streaming import BeamStream
from kvjax.generation.options import GenerationOptions
from kvjax.generation.programs import Cached
from kvjax.generation.request import prepare_request
from kvjax.generation.results import Timer
from kvjax.layouts import Dense, Growing, Paged, Ring
from kvjax.operations.rows import branch_rows
from kvjax.sampling.params import prepare_sampling
from tests import laws, matrix, naive
from tests.copies import assert_no_copy
from tests.matrix import some, tiny_model
from tests.test_prefixes import small
from tests.test_scores import known

PROMPTS = [[5, 3, 8, 1], [2, 9, 4, 4, 7, 1, 6]]
ENDS, NEW = [30, 33, 34, 37, 38, 39, 44, 55, 57, 59], 8
GIVEN = {"max_new_tokens": NEW, "prefill_chunk": 16, "num_beams": 4, "eos_token_ids": ENDS}


@functools.cache
def one_layer():
    """A model of one layer, because more layers take longer to compile."""
    return small(num_hidden_layers=1, windows=(None,))


@pytest.fixture(scope="module")
def lm():
    return one_layer()


@functools.cache
def log_probabilities(text):
    """Log-probabilities of the next token, without a cache."""
    logits = np.asarray(known(one_layer(), list(text[:1]), [*text[1:], 0])[-1], np.float64)
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def searched(prompt, *, n, beams=4, groups=1, penalty=1.0, early=False, diversity=0.0, form=None):
    """The best sequences and their scores, by exhaustive lists of continuations, or of those that a
    ``form`` allows; and the number of tokens after which each group ends."""
    width, over = beams // groups, [False] * groups
    live: Any = [[((), 0.0)] for _ in range(groups)]
    ended: Any = [[] for _ in range(groups)]
    steps = [NEW] * groups
    for length in range(1, NEW + 1):
        chosen = np.zeros(61)
        for group in range(groups):
            if over[group]:
                continue
            every = []
            for text, score in live[group]:
                total = log_probabilities((*prompt, *text)) - diversity * chosen + score
                allowed = range(61) if form is None else form((*prompt, *text))
                every += [((*text, token), total[token]) for token in allowed]
            every.sort(key=lambda each: -each[1])
            for text, score in every[:width]:
                if text[-1] in ENDS or length == NEW:
                    ended[group].append((text, score / length**penalty))
            ended[group] = sorted(ended[group], key=lambda each: -each[1])[:width]
            live[group] = [each for each in every if each[0][-1] not in ENDS][:width]
            for text, _ in live[group]:
                chosen[text[-1]] += 1
            steps[group], full = length, len(ended[group]) == width
            if not live[group]:
                over[group] = True
                continue
            to = NEW if early == "never" and penalty > 0 else length
            hoped = live[group][0][1] / to**penalty
            over[group] = full and (early is True or hoped <= ended[group][-1][1])
    return sorted(itertools.chain(*ended), key=lambda each: -each[1])[:n], steps


CASES = {
    "plain": {}, "long": {"penalty": 2.0}, "early": {"early": True},
    "never": {"early": "never", "penalty": 0.5}, "short": {"penalty": -1.0},
    "groups": {"groups": 2, "diversity": 0.7},
    "groups of one": {"groups": 4, "diversity": 1.5, "early": True},
}  # fmt: skip
NAMES = {
    "penalty": "length_penalty", "early": "early_stopping", "groups": "num_beam_groups",
    "diversity": "diversity_penalty",
}  # fmt: skip


@pytest.mark.slow(but=("early", "never", "groups"))
@pytest.mark.parametrize("name", some(CASES, *(set(CASES) - {"groups of one"})))
def test_the_texts_are_those_of_lists(lm, name):
    given = {NAMES[key]: value for key, value in CASES[name].items()}
    running: Any = kvjax.stream(lm, PROMPTS, n=3, logprobs=2, **GIVEN, **given)
    list(running)
    found, steps = running.result, running._state.count.tolist()
    for number, prompt in enumerate(PROMPTS):
        here = slice(3 * number, 3 * number + 3)
        wanted, after = searched(prompt, n=3, **CASES[name])
        assert steps[number] == after
        np.testing.assert_allclose(
            found.sequence_scores[here], [score for _, score in wanted], atol=1e-5
        )
        assert found.tokens[here] == [list(text) for text, _ in wanted]
        for ids, told, reason in zip(
            found.tokens[here], found.logprobs[here], found.stats.finish_reasons[here], strict=True
        ):
            assert reason == ("eos" if ids[-1] in ENDS else "length")
            logits = known(lm, prompt, ids)
            own = np.asarray(jax.nn.log_softmax(logits))
            np.testing.assert_allclose(
                [each.logprob for each in told], own[range(len(ids)), ids], atol=1e-5
            )
            best = np.sort(own, axis=1)[:, :-3:-1]
            likeliest = [[value for _, value in each.top_logprobs] for each in told]
            np.testing.assert_allclose(likeliest, best, atol=1e-5)
            assert all(each.sampling_logprob == 0 for each in told)


def form(text):
    """The tokens allowed after a sequence, by the sum of its tokens. Rarely only end tokens, or
    fewer tokens than beams."""
    state = sum(text) % 7
    return ([30, 57], [3, 44])[state] if state < 2 else [x for x in range(61) if (x + state) % 3]


class Form:
    """A guide that enforces ``form``."""

    def __init__(self, text):
        self.text = list(text)

    def allowed(self):
        words = np.zeros(2, np.uint32)
        for token in form(self.text):
            words[token // 32] |= np.uint32(1 << token % 32)
        return words

    def accept(self, token):
        assert token in form(self.text)
        self.text.append(token)

    def copy(self):
        return Form(self.text)


@pytest.mark.parametrize("name", some(CASES, "plain", "groups"))
def test_beams_keep_to_guides(lm, name):
    """Sequences equal those of lists. Result guides accepted them; given ones are unchanged."""
    given = {NAMES[key]: value for key, value in CASES[name].items()}
    guides = [Form(prompt) for prompt in PROMPTS]
    found = kvjax.generate(lm, PROMPTS, n=4, guide=guides, **GIVEN, **given)
    none = [((), -np.inf)] * 4
    wanted = [(searched(x, n=4, form=form, **CASES[name])[0] + none)[:4] for x in PROMPTS]
    texts, scores = zip(*itertools.chain(*wanted), strict=True)
    np.testing.assert_allclose(found.sequence_scores, scores, atol=1e-5)
    assert found.tokens == [list(text) for text in texts]
    assert [guide.text for guide in guides] == PROMPTS
    for row, (guide, ids) in enumerate(zip(found.guides, found.tokens, strict=True)):
        assert guide.text == [*PROMPTS[row // 4], *ids]


GUIDED = {
    "static": "static", "paged": kvjax.policy("paged", page_size=16),
    "8 bits": kvjax.policy(bits=8, block=8), "dynamic": kvjax.CachePolicy(Growing(start=8)),
    "ring": kvjax.CachePolicy(Ring(8, sinks=2, slack=15)),
    "host": kvjax.CachePolicy(placement=kvjax.Host(), block=8), "none": None, "mesh": "static",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some(GUIDED, "none"))
def test_guides_forbid_what_a_hook_forbids(lm, name):
    """With any cache, and when streamed. The cache holds the sequences. Nothing compiles again."""

    def hook(logits, tokens, length):
        there = jnp.arange(tokens.shape[1]) < length[:, None]
        state = jnp.sum(jnp.where(there, tokens, 0), axis=1)[:, None] % 7
        at = jnp.arange(logits.shape[1])
        few = jnp.where(state == 0, (at == 30) | (at == 57), (at == 3) | (at == 44))
        return jnp.where(jnp.where(state < 2, few, (at + state) % 3 != 0), logits, -jnp.inf)

    model = lm.on(kvjax.make_mesh(data=2, tensor=2)) if name == "mesh" else lm
    more = {"use_cache": False} if name == "none" else {"cache": GUIDED[name]}
    given = {**GIVEN, **more, "n": 3, "logprobs": 0, "repetition_penalty": 1.2}
    prompts = [*PROMPTS, PROMPTS[0]]  # a number that the data axis does not divide
    wanted = kvjax.generate(model, prompts, logits_hook=hook, **given)
    running = kvjax.stream(model, prompts, guide=[*map(Form, prompts)], **given)
    pieces = list(running)
    found = running.result
    assert found.tokens == wanted.tokens and found.pending_tokens == wanted.pending_tokens
    np.testing.assert_allclose(found.sequence_scores, wanted.sequence_scores, atol=1e-5)
    told = [[[x.logprob for x in row] for row in each.logprobs] for each in (found, wanted)]
    for row, other in zip(*told, strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5)
    for row, tokens in enumerate(found.tokens):
        assert [*itertools.chain(*(piece.tokens[row] for piece in pieces))] == tokens
    assert len(pieces) == running._state.count.max()  # each step needs the one before
    with (meter := Timer()).running():
        kvjax.generate(model, prompts[::-1], guide=[*map(Form, prompts[::-1])], **given)
    assert meter.compilations == 0
    if wanted.cache is not None:
        plain = {"max_new_tokens": 3, "eos_token_ids": (), "prefill_chunk": 16}
        both = (
            kvjax.generate(model, x.pending_tokens, cache=x.cache, **plain) for x in (found, wanted)
        )
        assert len({str(each.tokens) for each in both}) == 1


def test_a_free_prompt_is_what_it_is_alone(lm):
    guide = Form(PROMPTS[0])
    found = kvjax.generate(lm, PROMPTS, n=3, guide=[guide, None], **GIVEN)
    alone = kvjax.generate(lm, PROMPTS, n=3, **GIVEN)
    guided = kvjax.generate(lm, PROMPTS, n=3, guide=[guide, Form(PROMPTS[1])], **GIVEN)
    assert found.tokens == guided.tokens[:3] + alone.tokens[3:]
    np.testing.assert_allclose(
        found.sequence_scores, guided.sequence_scores[:3] + alone.sequence_scores[3:], atol=1e-5
    )
    assert found.guides[3:] == (None,) * 3 and guided.tokens[3:] != alone.tokens[3:]


@pytest.mark.rare
def test_one_beam_is_greedy(lm):
    given = {"max_new_tokens": NEW, "prefill_chunk": 16, "eos_token_ids": ENDS}
    request = prepare_request(lm, PROMPTS, GenerationOptions(**given))
    request = dataclasses.replace(request, search=SearchConfig(1, BeamConfig(1), early_stopping=1))
    running = BeamStream(lm, request, streamed=False)
    list(running)
    assert running.result.tokens == kvjax.generate(lm, PROMPTS, num_beams=1, **given).tokens


@pytest.mark.parametrize("policy", some(("static", "int8", "ring", "none"), "static"))
def test_texts_go_on_from_the_result(lm, policy):
    """From the cache and the tokens that each row lacks. Padded results are equal."""
    choice = {"static": "static", "int8": kvjax.policy(bits=8, block=8), "none": "static",
              "ring": kvjax.CachePolicy(Ring(8, sinks=2, slack=15))}[policy]  # fmt: skip
    more = {"use_cache": False} if policy == "none" else {"cache": choice}
    found = kvjax.generate(lm, PROMPTS, n=3, logprobs=2, **more, **GIVEN)
    arrays = kvjax.generate(lm, PROMPTS, n=3, padded=True, logprobs=2, **more, **GIVEN)
    assert [row[:n].tolist() for row, n in zip(arrays.tokens, arrays.lengths, strict=True)] == (
        found.tokens
    )
    assert arrays.logprobs.logprobs.shape == (6, NEW) and found.stats.new_tokens == sum(
        map(len, found.tokens)
    )
    if policy == "none":
        assert found.cache is None
        return
    texts = [[*PROMPTS[n // 3], *ids] for n, ids in enumerate(found.tokens)]
    held = found.cache.length.tolist()
    for text, ids, pending_tokens, length in zip(
        texts, found.tokens, found.pending_tokens, held, strict=True
    ):
        assert (
            pending_tokens
            and ids[-len(pending_tokens) :] == pending_tokens
            and length == len(text) - len(pending_tokens)
        )
    plain = {"max_new_tokens": 3, "eos_token_ids": (), "prefill_chunk": 16}
    wanted = kvjax.generate(lm, texts, cache=choice, **plain).tokens
    assert kvjax.generate(lm, found.pending_tokens, cache=found.cache, **plain).tokens == wanted


class Counting:
    """A model that counts its traces by shape."""

    def __init__(self, model, seen):
        self.model, self.seen = model, seen

    def __getattr__(self, name):
        return getattr(self.model, name)

    def apply(self, params, tokens, *args, **options):
        self.seen.append(tokens.shape)
        return self.model.apply(params, tokens, *args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("enough", [True, pytest.param(False, marks=pytest.mark.rare)])
def test_beams_share_the_prefill_and_the_pages_of_their_prompt(lm, enough):
    """The prompt is prefilled once, in chunks of one row. Its full pages exist once, and each beam
    only needs pages for the rest. Pools are sized for that, and a smaller one is not enough."""
    prompt, new, page = [(7 * n) % 61 for n in range(101)], 20, 16
    given = {**GIVEN, "max_new_tokens": new, "eos_token_ids": (), "n": 4}
    full, most = len(prompt) // page, -(-(len(prompt) + new) // page)
    least = full + 4 * (most - full)
    assert least == 14 < 4 * most // 2
    options = GenerationOptions(cache=kvjax.CachePolicy(Paged(page)), **given)
    made: Any = prepare_request(lm, [prompt], options).policy
    assert made[0].layout.pages == least
    seen = []
    counted = dataclasses.replace(lm, architecture=Counting(lm.architecture, seen))
    policy = kvjax.CachePolicy(Paged(page, pages=least if enough else least - 4))
    if not enough:
        with pytest.raises(kvjax.CacheOverflowError, match="pages"):
            kvjax.generate(lm, [prompt], cache=policy, **given)
        return
    found = kvjax.generate(counted, [prompt], cache=policy, **given)
    assert seen == [(1, 16), (4, 1)]
    texts = np.array([prompt + ids for ids in found.tokens])
    known = np.asarray(jax.nn.log_softmax(jax.jit(lm.apply)(lm.params, texts)))[:, 100:-1]
    own = np.take_along_axis(known, texts[:, 101:, None], axis=2).sum((1, 2)) / new
    np.testing.assert_allclose(found.sequence_scores, own, atol=1e-5)
    assert len({tuple(ids) for ids in found.tokens}) == 4


CELLS = {
    "dense of 8 bits": (("int8", "int4"), "dense", "device"),
    "growing on the host": (("float32",), "growing", "host"),
    "ring": (("float32",), "narrow", "device"),
    "pages of codes": (("int4", "int8"), "paged", "device"),
    "sinks on the host": (("int2", "int3"), "sinks", "host-1"),
    "pages and sinks": (("float8", "rotated"), "paged-sinks", "device"),
    "dense": (("bfloat16",), "dense", "device"),
    "pages on the host": (("float16",), "paged", "host"),
    "stacked": (("int8", "int4"), "dense", "device"),
    "pages of a stack": (("float32",), "paged", "device"),
}  # fmt: skip


@pytest.mark.slow(but=("ring", "growing on the host"))
@pytest.mark.parametrize("name", some(CELLS, "dense of 8 bits", "growing on the host", "ring"))
def test_rows_go_on_from_others_in_place(name):
    """With any layout, codec and placement, a row equals one that always had that sequence."""
    codecs, layout, placement = CELLS[name]
    held, common = matrix.policy_case(codecs, layout, placement), 21
    text = [x.copy() for x in laws.texts()]
    for x in text:
        x[:, :, :common] = x[:1, :, :common]
    (window, sinks), rows = held.sight, np.array([0, 0, 2])
    true = np.array([
        naive.attended(
            *(x.astype(np.float64).swapaxes(0, 1) for x in row), store=held.store,
            cap=None if window is None else sinks + window - 1, window=window, sinks=sinks,
            coded=held.coded,
        )
        for row in zip(*text, strict=True)
    ]).swapaxes(1, 2)  # fmt: skip
    cache = laws.empty(held, 64, stacked="stack" in name)
    begins = np.zeros(3, int)
    for take in (16, 5, 15, 2):
        _, cache = laws.step(cache, begins, [take] * 3, 16, text)
        begins += take
    since = np.full(3, common, np.int32)
    branch = jax.jit(branch_rows, donate_argnums=0)
    cache = branch(cache, rows.astype(np.int32), since)
    for _ in range(2):
        found, cache = laws.step(cache, begins, [9, 9, 3], 16, text, rows)
        wanted = laws.expected_outputs(true, begins, [9, 9, 3], 16, rows)
        laws.close(found, wanted, held.tolerance)
        begins += [9, 9, 3]
        if begins.max() > 50:
            break
        # Rows of one prompt with different lengths.
        cache, rows = branch(cache, np.array([1, 1, 2], np.int32), since), rows[[1, 1, 2]]
    kvjax.check(cache)


def test_what_rows_have_in_common_is_not_copied(lm):
    """Nor is anything copied of a row that stays."""
    cache = kvjax.init_cache(lm.config, batch=3, max_len=512)
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    cache, _ = kvjax.prefill(lm, rows, cache=cache)
    before = np.asarray(cache.layers[0].keys)
    after = jax.jit(branch_rows)(cache, np.array([2, 1, 2]), np.array([1, 1, 1], np.int32))
    keys = np.asarray(after.layers[0].keys)
    np.testing.assert_array_equal(keys[1:], before[1:])
    np.testing.assert_array_equal(keys[0, :, :1], before[0, :, :1])
    np.testing.assert_array_equal(keys[0, :, 1:3], before[2, :, 1:3])


POLICIES = {
    "dense": kvjax.CachePolicy(), "pages": kvjax.CachePolicy(Paged(256)),
    "codes": kvjax.policy(bits=8), "ring": kvjax.CachePolicy(Ring(8192, sinks=1)),
    "pages of codes": kvjax.policy("paged", bits=4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some(POLICIES, "dense"))
def test_a_search_copies_no_more_than_some_tokens_of_rows(name):
    """Nor does a step with guides."""
    model, _ = tiny_model(num_hidden_layers=1, windows=(None,), head_dim=16)
    beams, temporary = BeamConfig(4), []
    filters, settings = prepare_sampling(seeds=[0] * 4, eos_token_ids=[3])
    shapes = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    for size in (16384, 65536):
        policy = POLICIES[name]
        make = functools.partial(kvjax.init_cache, model.config, policy, batch=4, max_len=size)
        cache = jax.eval_shape(make)
        start = initial_state(jnp.ones(1, bool), jnp.zeros(4, jnp.int32), beams, None)
        numbers = SearchParams(jnp.float32(1), jnp.int32(0), jnp.float32(0))
        given = (
            model.abstract_params(), Cached(cache), shapes(start), None, shapes(settings),
            shapes(numbers), jnp.int32(9), jnp.int32(9),
        )  # fmt: skip
        vocab = model.config.vocab_size
        logits = jax.ShapeDtypeStruct((4, vocab), jnp.float32)
        masks = jax.ShapeDtypeStruct((4, -(-vocab // 32)), jnp.uint32)
        programs = (
            beam_programs.search.lower(model, filters, beams, *given).compile(),
            beam_programs.choose.lower(logits, filters, beams, *given[1:-1], masks).compile(),
        )
        for program in programs:
            assert_no_copy(program, kvjax.nbytes(cache)["device"], tree_bytes(cache.layers[0]))
        temporary.append([x.memory_analysis().temp_size_in_bytes for x in programs])
    # With pages, tables and counts are new arrays.
    tables = tree_bytes(cache.pools)
    for least, most in zip(*temporary, strict=True):
        assert 0 <= most - least <= 4 * tables


def test_other_numbers_compile_nothing(lm):
    kvjax.generate(lm, PROMPTS, n=3, logprobs=2, **GIVEN)
    for more in ({"length_penalty": 0.3}, {"early_stopping": True}, {"n": 3}):
        given = {**GIVEN, "eos_token_ids": [1, 2], "max_new_tokens": 5, "n": 3, **more}
        with (meter := Timer()).running():
            kvjax.generate(lm, PROMPTS[::-1], logprobs=2, **given)
        assert meter.compilations == 0


@pytest.mark.rare
@pytest.mark.parametrize("growing", [False, True])
def test_a_search_is_compiled_ahead(lm, growing):
    policy = kvjax.CachePolicy(Growing(start=16) if growing else Dense())
    given = {name: GIVEN[name] for name in ("num_beams", "prefill_chunk", "eos_token_ids")}
    given |= {"max_len": 64, "num_beam_groups": 2}
    made = kvjax.compile(lm, policy, batch=2, **given)
    assert ("search of 64" if growing else "search") in made.executables
    for new in (3, 40):
        more = {"max_new_tokens": new, "cache": policy, "diversity_penalty": 0.4}
        found = kvjax.generate(lm, PROMPTS, **given, **more)
        assert found.stats.compilations == 0


def test_a_stream_gives_what_all_texts_have_in_common(lm, monkeypatch):
    monkeypatch.setattr("kvjax.generation.beams.streaming._WATCHED_STEPS", 2)
    early = []
    for ends in (ENDS, ()):
        given = {**GIVEN, "max_new_tokens": 24, "eos_token_ids": ends, "n": 2, "logprobs": 2}
        running = kvjax.stream(lm, PROMPTS, **given)
        pieces = list(running)
        found = running.result
        assert found.tokens == kvjax.generate(lm, PROMPTS, **given).tokens
        for row, tokens in enumerate(found.tokens):
            assert [*itertools.chain(*(each.tokens[row] for each in pieces))] == tokens
        for piece in pieces[:-1]:
            # Before the end, all rows of a prompt get the same pieces.
            assert piece.tokens[0] == piece.tokens[1] and piece.tokens[2] == piece.tokens[3]
            early.append(any(piece.tokens))
    assert any(early)


def test_penalties_and_hooks_go_by_each_beams_text(lm):
    """With a hook that forbids repeating the last token, and with counts."""

    def hook(logits, tokens, length):
        rows = jnp.arange(len(tokens))
        return logits.at[rows, tokens[rows, length - 1]].set(-jnp.inf)

    given = {**GIVEN, "eos_token_ids": (), "n": 4}
    found = kvjax.generate(lm, PROMPTS, logits_hook=hook, repetition_penalty=1.3, **given)
    for row, ids in enumerate(found.tokens):
        text = [*PROMPTS[row // 4], *ids]
        assert all(a != b for a, b in zip(ids, text[-NEW - 1 :], strict=False))
        score = 0.0
        for at, token in enumerate(ids, len(text) - len(ids)):
            own = np.array(log_probabilities(tuple(text[:at])))
            own[text[at - 1]] = -np.inf
            score += own[token] * (1.3 if token in text[:at] else 1)
        assert abs(found.sequence_scores[row] - score / NEW) < 1e-5


@pytest.mark.rare
def test_a_hook_that_leaves_nothing_is_told(lm):
    def forbidding(logits, tokens, length):
        return jnp.where((length == 9)[:, None], -jnp.inf, logits)

    given = {**GIVEN, "eos_token_ids": (), "n": 4}
    message = r"beams of prompt\(s\) 1 have logits that are not finite, after 2 new"
    with pytest.raises(kvjax.NonFiniteError, match=message):
        kvjax.generate(lm, PROMPTS, logits_hook=forbidding, **given)
    broken = lm.with_params(jax.tree.map(lambda x: x * jnp.nan, lm.params))
    with pytest.raises(kvjax.NonFiniteError, match=r"beams of prompt\(s\) 0, 1 are"):
        kvjax.generate(broken, PROMPTS, **given)


@pytest.mark.rare
def test_fewer_texts_than_are_asked_for_are_told(lm):
    """A hook leaves only two sequences."""

    def hook(logits, tokens, length):
        only = jnp.where(length == 4, 2, 1)[:, None]
        return jnp.where(jnp.arange(61) < only, logits, -jnp.inf)

    found = kvjax.generate(lm, PROMPTS[:1], logits_hook=hook, n=4, **{**GIVEN, "eos_token_ids": ()})
    assert sorted(found.tokens[:2]) == [[0] * 8, [1, *[0] * 7]] and found.tokens[2:] == [[], []]
    assert np.isneginf(found.sequence_scores).tolist() == [False, False, True, True]


def test_the_best_of_samples(lm):
    given = {"max_new_tokens": 6, "prefill_chunk": 16, "temperature": 1.2, "seed": 3}
    every = kvjax.generate(lm, PROMPTS, n=4, logprobs=0, eos_token_ids=ENDS, **given)
    means = np.array([np.mean([x.logprob for x in row]) for row in every.logprobs]).reshape(2, 4)
    found = kvjax.generate(lm, PROMPTS, n=3, best_of=4, eos_token_ids=ENDS, **given)
    order = np.argsort(-means, axis=1)[:, :3] + [[0], [4]]
    assert found.tokens == [every.tokens[row] for row in order.ravel()]
    np.testing.assert_allclose(found.sequence_scores, means.ravel()[order.ravel()], atol=1e-6)
    assert found.logprobs is None and len(found.stats.finish_reasons) == 6
    assert found.pending_tokens == [row[-1:] for row in found.tokens]
    texts = [[*PROMPTS[n // 3], *ids] for n, ids in enumerate(found.tokens)]
    assert found.cache.length.tolist() == [len(text) - 1 for text in texts]
    plain = {"max_new_tokens": 3, "eos_token_ids": (), "prefill_chunk": 16}
    more = kvjax.generate(lm, found.pending_tokens, cache=found.cache, **plain).tokens
    assert more == kvjax.generate(lm, texts, **plain).tokens
    arrays = kvjax.generate(
        lm, PROMPTS, n=3, best_of=4, eos_token_ids=ENDS, padded=True, logprobs=0, **given
    )
    assert arrays.lengths.tolist() == list(map(len, found.tokens))
    mean = arrays.logprobs.logprobs.sum(1) / arrays.lengths
    np.testing.assert_allclose(mean, found.sequence_scores, atol=1e-6)


@pytest.mark.rare
def test_a_tree_of_prefixes_keeps_what_beams_read(lm):
    policy = kvjax.CachePolicy(Paged(16))
    tree = kvjax.PrefixTree(lm, policy, max_len=64, pages=40, prefill_chunk=16)
    prompt = [[(5 * n) % 61 for n in range(37)]]
    given = {**GIVEN, "eos_token_ids": (), "n": 2}
    wanted = kvjax.generate(lm, prompt, **given)
    for hits in (0, 32):
        found = kvjax.generate(lm, prompt, prefix_cache=tree, prefill_chunk=16, **{
            name: value for name, value in given.items() if name != "prefill_chunk"
        })  # fmt: skip
        assert found.tokens == wanted.tokens and found.stats.cached_tokens == hits
        np.testing.assert_allclose(found.sequence_scores, wanted.sequence_scores, atol=1e-5)
        assert found.cache is None
    # All pages are free or belong to the tree.
    assert kvjax.generate(lm, prompt, prefix_cache=tree, **given).tokens == wanted.tokens


MESHES = [
    f"{shape} {policy}" for shape in ("4-1-1", "2-2-1", "1-2-2")
    for policy in ("static", "paged", "codes", "host")
    if (shape, policy) != ("1-2-2", "paged")  # pages are not split over the sequence axis
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", some(MESHES, "4-1-1 static"))
def test_on_a_mesh(lm, name):
    """With a number of rows that the data axis does not divide."""
    shape, policy = name.split()
    data, tensor, sequence = map(int, shape.split("-"))
    choice = {
        "paged": kvjax.CachePolicy(Paged(16, pages=64)),
        "codes": kvjax.policy(bits=8, block=8),
        "host": kvjax.CachePolicy(placement=kvjax.Host(), block=8),
    }  # fmt: skip
    given = {**GIVEN, "n": 3, "logprobs": 2, "cache": choice.get(policy, "static")}
    spread = lm.on(kvjax.make_mesh(data=data, tensor=tensor, sequence=sequence))
    wanted, found = (kvjax.generate(x, PROMPTS, **given) for x in (lm, spread))
    assert found.tokens == wanted.tokens and found.pending_tokens == wanted.pending_tokens
    np.testing.assert_allclose(found.sequence_scores, wanted.sequence_scores, atol=1e-5)
    assert kvjax.generate(spread, PROMPTS[::-1], **given).stats.compilations == 0
    plain = {"max_new_tokens": 3, "eos_token_ids": (), "prefill_chunk": 16}
    more = [kvjax.generate(x, y.pending_tokens, cache=y.cache, **plain).tokens
            for x, y in ((lm, wanted), (spread, found))]  # fmt: skip
    assert more[0] == more[1]


WRONG = {
    "n": ({"n": 5}, "n is 5, but num_beams=4 finds only 4"),
    "groups": ({"num_beam_groups": 3, "diversity_penalty": 1.0}, "must divide num_beams=4"),
    "no diversity": ({"num_beam_groups": 2}, "diversity_penalty is 0.0 with num_beam_groups=2"),
    "one group": ({"diversity_penalty": 1.0}, "diversity_penalty is 1.0 with num_beam_groups=1"),
    "drawn": ({"temperature": 0.5}, "temperature is 0.5, but a beam search"),
    "stop": ({"stop": "x"}, "can't use stop strings"),
    "early": ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
    "one": ({"early_stopping": 1}, "early_stopping is 1"),
    "a list": ({"early_stopping": [1]}, r"early_stopping is \[1\]"),
    "a power": ({"length_penalty": 8}, "length_penalty must be a number from -7 to 7, got 8"),
    "penalty": ({"length_penalty": float("nan")}, "length_penalty must be a number"),
    "beams": ({"num_beams": 2.5}, "num_beams must be an integer"),
    "both": ({"best_of": 4}, "best_of can't be combined with num_beams"),
    "no search": ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty is 2.0, but num_beams"),
    "best": ({"num_beams": 1, "best_of": 2, "n": 3}, "best_of is 2, but must be at least n=3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_go_together_is_refused(lm, name):
    given, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        kvjax.generate(lm, PROMPTS, **{**GIVEN, **given})
    with pytest.raises(ValueError, match="best_of can't be streamed"):
        kvjax.stream(lm, PROMPTS, best_of=3, temperature=1.0)
