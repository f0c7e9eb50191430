"""Generation: with and without a cache, ends of texts, streaming, continuation, bad input."""

import dataclasses
import inspect
import types
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax.codecs import Integer
from kvjax.generation import options, programs
from kvjax.generation.generator import generate, stream
from kvjax.generation.model import capacity_bucket
from kvjax.generation.request import padded_width
from kvjax.layouts import Growing
from kvjax.memory import InferenceLimits
from kvjax.models.text import Tokenizer
from kvjax.sampling.params import SamplingKeywords, prepare_sampling
from tests.copies import assert_no_copy
from tests.matrix import tiny_config
from tests.scripted import scripted
from tests.threads import together

PROMPTS = [list(range(40, 77)), [7], list(range(100, 120))]
EOS = 257
FILTERED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3}
# Prompts of any length in chunks of one width, and the default capacity: the tests share programs.
SHARED: dict[str, Any] = {"prefill_chunk": 16, "eos_token_ids": ()}


def joined(*merges):
    """A byte-level tokenizer that also has a token for each of ``merges``, pairs of letters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = alphabet + ["".join(pair) for pair in merges]
    model = tokenizers.models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=list(merges))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


# The same tokens, however they are computed


def naive_greedy(lm, prompt, new, penalty=1.0):
    apply = jax.jit(lm.architecture.apply)
    ids = list(prompt)
    for _ in range(new):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.array(apply(lm.params, tokens)[0, len(ids) - 1])
        seen = np.unique(ids)
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("chunk", [512, 16, 7])
def test_greedy_tokens_are_those_of_the_uncached_model(tiny_llama, chunk):
    expected = [naive_greedy(tiny_llama, prompt, 6) for prompt in PROMPTS]
    result = generate(tiny_llama, PROMPTS, max_new_tokens=6, prefill_chunk=chunk, eos_token_ids=())
    assert result.tokens == expected
    assert result.cache.length.tolist() == [len(prompt) + 5 for prompt in PROMPTS]


@pytest.mark.slow(but=("greedy",))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 1.2, "seed": 5},
        FILTERED,
    ],
    ids=["greedy", "sampled", "filtered"],
)
def test_without_a_cache_come_the_same_tokens(tiny_llama, settings):
    settings = {"max_new_tokens": 12} | SHARED | settings
    cached = generate(tiny_llama, PROMPTS, **settings)
    uncached = generate(tiny_llama, PROMPTS, **settings, use_cache=False)
    assert uncached.tokens == cached.tokens
    assert uncached.text == cached.text
    assert uncached.cache is None and uncached.stats.cache_bytes == {}


@pytest.mark.slow
def test_a_row_has_the_same_text_whatever_else_is_in_the_batch(tiny_llama):
    settings = {"max_new_tokens": 20, **SHARED, **FILTERED}
    together = generate(tiny_llama, PROMPTS, seed=[11, 5, 8], **settings)
    reversed_rows = generate(tiny_llama, PROMPTS[::-1], seed=[8, 5, 11], **settings)
    assert reversed_rows.tokens == together.tokens[::-1]
    for row, seed in enumerate([11, 5, 8]):
        alone = generate(tiny_llama, [PROMPTS[row]], seed=seed, **settings)
        assert alone.tokens == together.tokens[row : row + 1]
    counted = generate(tiny_llama, [PROMPTS[0]] * 3, seed=4, **settings)
    listed = generate(tiny_llama, [PROMPTS[0]] * 3, seed=[4, 5, 6], **settings)
    assert counted.tokens == listed.tokens
    assert len({tuple(tokens) for tokens in counted.tokens}) == 3


def test_the_repetition_penalty_knows_prompt_and_new_tokens(tiny_llama):
    settings = {"max_new_tokens": 8, "repetition_penalty": 1.8, **SHARED}
    expected = [naive_greedy(tiny_llama, prompt, 8, penalty=1.8) for prompt in PROMPTS]
    assert generate(tiny_llama, PROMPTS, **settings).tokens == expected


# Where a text ends


def test_a_row_ends_with_its_end_of_text_token(byte_tokenizer):
    rows = [[*b"abc", EOS, *b"never"], list(b"abcdefghij"), [*b"a", EOS]]
    lm = scripted(*rows, tokenizer=byte_tokenizer, eos=(EOS,))
    result = generate(lm, [[1], [1, 1], [1]], max_new_tokens=6)
    assert result.tokens == [[*b"bc", EOS], list(b"cdefgh"), [EOS]]
    assert result.text == [decoded(lm, tokens) for tokens in (b"bc", b"cdefgh", b"")]
    assert result.stats.finish_reasons == ("eos", "length", "eos")
    # The newest token of each row is not fed, and the cache of a finished row does not grow.
    assert result.cache.length.tolist() == [3, 7, 1]
    assert result.pending_tokens == [[EOS], [ord("h")], [EOS]]
    assert (result.stats.prompt_tokens, result.stats.new_tokens) == (4, 10)


def decoded(lm, tokens):
    return lm.tokenizer.decode(list(tokens))


def test_all_loops_end_when_all_rows_are_done(byte_tokenizer):
    lm = scripted([1, 2, 3, EOS], [1, 2, EOS], tokenizer=byte_tokenizer, eos=(EOS,))
    result = generate(lm, [[1], [1]], max_new_tokens=2000)
    assert result.cache.length.tolist() == [3, 2]
    assert np.asarray(result.cache.written).tolist() == [[3], [2]]
    pieces = list(stream(lm, [[1], [1]], max_new_tokens=2000))
    assert sum(len(piece.tokens[0]) for piece in pieces) == 3


def test_end_of_text_tokens_of_ones_own(byte_tokenizer):
    lm = scripted([1, 2, EOS, 3, 4, 5, 6], tokenizer=byte_tokenizer, eos=(EOS,))
    assert generate(lm, [[1]], max_new_tokens=5, eos_token_ids=4).tokens == [[2, EOS, 3, 4]]
    assert generate(lm, [[1]], max_new_tokens=5, eos_token_ids=[5, 3]).tokens == [[2, EOS, 3]]
    never = generate(lm, [[1]], max_new_tokens=5, eos_token_ids=())
    assert never.tokens == [[2, EOS, 3, 4, 5]]
    assert never.text == [decoded(lm, [2, 3, 4, 5])]
    many = generate(lm, [[1]], max_new_tokens=5, eos_token_ids=[*range(100, 120), 3])
    assert many.tokens == [[2, EOS, 3]]


def test_min_new_tokens_holds_the_end_back(byte_tokenizer):
    lm = scripted([1, EOS, EOS, EOS, EOS], tokenizer=byte_tokenizer, eos=(EOS,))
    tokens = generate(lm, [[1]], max_new_tokens=6, min_new_tokens=3).tokens[0]
    assert len(tokens) == 4 and tokens.index(EOS) == 3


def test_one_token(byte_tokenizer):
    lm = scripted("abc", tokenizer=byte_tokenizer)
    result = generate(lm, "a", max_new_tokens=1)
    assert (result.text, result.cache.length.tolist()) == (["b"], [1])
    assert result.stats.finish_reasons == ("length",)
    assert result.stats.decode_tokens_per_second == 0.0


LONG = "the quick brown fox jumps over the lazy dog, and then it sleeps; STOP the rest is noise"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("STOP", LONG[1:65]),
        (["nowhere", "STOP"], LONG[1:65]),
        ("dog", LONG[1:40]),
        ("h", ""),
        ("he", ""),
        (["er the", "ver"], LONG[1:27]),  # "ver" is complete first
        (["over th", "ver t"], LONG[1:27]),  # both begin, the second is complete first
        ("q", "he "),
        ("nowhere", LONG[1:81]),
        # Held back as a possible beginning, and given at the end.
        (LONG[70:81] + "?", LONG[1:81]),
    ],
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_text_and_cache_end_before_a_stop_string(byte_tokenizer, stop, text, use_cache):
    lm = scripted(LONG, tokenizer=byte_tokenizer)
    result = generate(lm, LONG[:1], max_new_tokens=80, stop=stop, use_cache=use_cache)
    assert result.text == [text]
    assert result.tokens == [lm.tokenizer.encode(text)]
    stopped = len(text) < 80
    assert result.stats.finish_reasons == ("stop" if stopped else "length",)
    if use_cache:
        assert result.cache.length.tolist() == [1 + len(text) - (not stopped)]
        assert result.pending_tokens == [[] if stopped else result.tokens[0][-1:]]


def test_rows_stop_each_on_their_own(byte_tokenizer):
    rows = ["ab#" + 40 * "c", "a" + 50 * "b" + "#c", "abc"]
    lm = scripted(*rows, tokenizer=byte_tokenizer)
    result = generate(lm, ["a", "a", "a"], max_new_tokens=60, stop="#")
    assert result.text[:2] == ["b", 50 * "b"]
    assert result.stats.finish_reasons == ("stop", "stop", "length")
    assert result.cache.length.tolist() == [2, 51, 60]


def test_a_stop_string_that_begins_inside_a_token(byte_tokenizer):
    tokenizer = joined(("x", "y"), ("z", "w"))
    lm = scripted("axyzwb", tokenizer=tokenizer)
    result = generate(lm, "a", max_new_tokens=3, stop="yz")
    assert result.text == ["x"]
    # "xy" reaches into the stop string: neither tokens nor cache have it.
    assert (result.tokens, result.cache.length.tolist(), result.pending_tokens) == ([[]], [1], [[]])
    result = generate(lm, "a", max_new_tokens=3, stop="zw")
    assert (result.text, result.cache.length.tolist()) == (["xy"], [2])
    assert result.tokens == [tokenizer.encode("xy")]


@pytest.mark.parametrize("stop", ["é", "本", "🙂🙂"])
def test_stop_strings_of_several_bytes(byte_tokenizer, stop):
    text = "a日本語é🙂🙂b"
    lm = scripted(text, tokenizer=byte_tokenizer)
    result = generate(lm, "a", max_new_tokens=20, stop=stop)
    before = text[1 : text.index(stop)]
    assert result.text == [before]
    assert result.tokens == [lm.tokenizer.encode(before)]
    assert result.cache.length.tolist() == [1 + len(before.encode())]


# Streaming


def assert_pieces_make_the_result(lm, prompts, **settings):
    expected = generate(lm, prompts, **settings)
    running = stream(lm, prompts, **settings)
    pieces = list(running)
    rows = range(len(expected.tokens))
    assert ["".join(piece.text[row] for piece in pieces) for row in rows] == expected.text
    assert [[t for piece in pieces for t in piece.tokens[row]] for row in rows] == expected.tokens
    assert running.result.text == expected.text
    assert running.result.tokens == expected.tokens
    assert running.result.pending_tokens == expected.pending_tokens
    np.testing.assert_array_equal(running.result.cache.length, expected.cache.length)
    assert pieces[-1].stats.finish_reasons == expected.stats.finish_reasons
    return pieces


TEXTS = [
    "a plain text, and quite a long one, so that it takes more than one dispatch to the device",
    "日本語のテキスト、長い文章",
    "🙂🙃 mixed é with ñ and 🏳️‍🌈 STOP after",
    "",
]


@pytest.mark.parametrize("stop", [(), "STOP", ["のテ", "takes"], "\0never", "🙃"])
def test_pieces_make_the_text(byte_tokenizer, stop):
    lm = scripted(
        *("p" + text for text in TEXTS),
        tokenizer=byte_tokenizer,
    )
    for limit in (1, 2, 33, 60):
        pieces = assert_pieces_make_the_result(lm, ["p"] * 4, max_new_tokens=limit, stop=stop)
        if limit == 60:
            assert len(pieces) > 3


def test_only_whole_characters_are_streamed(byte_tokenizer):
    text = "é日🙂" * 8
    lm = scripted("p" + text, tokenizer=byte_tokenizer)
    size = len(text.encode())
    for piece in stream(lm, "p", max_new_tokens=size):
        assert "\N{REPLACEMENT CHARACTER}" not in piece.text[0]
        assert decoded(lm, piece.tokens[0]) == piece.text[0]
    # A text that is cut inside a character says so, at its end only.
    cut = generate(lm, "p", max_new_tokens=size - 2)
    assert cut.text == [text[:-1] + "\N{REPLACEMENT CHARACTER}"]
    assert_pieces_make_the_result(lm, "p", max_new_tokens=size - 2)


def test_stray_bytes_are_survived(byte_tokenizer):
    alphabet = byte_tokenizer.backend.get_vocab()
    stray = [alphabet[c] for c in "æĹ"]  # the first two bytes of a character of three
    rng = np.random.default_rng(0)
    lm = scripted(
        [1, *stray, *byte_tokenizer.encode("ok"), *stray],
        [1, *rng.integers(0, 256, 100).tolist()],
        tokenizer=byte_tokenizer,
    )
    assert_pieces_make_the_result(lm, [[1], [1]], max_new_tokens=100, stop="\0\0")


def test_a_beginning_of_a_stop_string_is_held_back(byte_tokenizer):
    lm = scripted("pabSTOabSTOP", tokenizer=byte_tokenizer)
    shown = ""
    for piece in stream(lm, "p", max_new_tokens=11, stop=["STOP"]):
        shown += piece.text[0]
        assert not shown.endswith(("S", "ST", "STO"))
    assert shown == "abSTOab"


@pytest.mark.parametrize(
    ("least", "text", "tokens"),
    [
        (0, "abc", 3),
        (3, "abc", 3),
        (4, "abc", 4),  # it begins within the first four, which stay
        (5, "abc", 5),
        (6, "abcSTOabc", 9),  # complete with the sixth, so it does not count
        (12, "abcSTOabcSTOx", 13),
    ],
)
def test_stop_strings_count_behind_the_least_tokens(byte_tokenizer, least, text, tokens):
    """Those that are complete with a later token, as in vLLM: in a stream and an engine too."""
    lm = scripted("pabcSTOabcSTOx", tokenizer=byte_tokenizer)
    settings: dict[str, Any] = {"max_new_tokens": 13, "min_new_tokens": least, "stop": ["STO"]}
    found = generate(lm, "p", **settings)
    assert (found.text, len(found.tokens[0])) == ([text], tokens)
    assert found.stats.finish_reasons == ("stop" if least < 12 else "length",)
    assert_pieces_make_the_result(lm, ["p"], **settings)


def test_a_sentence_piece_text_keeps_its_spaces(tmp_path):
    words = ["▁a", "▁b", "c", "▁", "<0xE6>", "<0x97>", "<0xA5>"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True
        )
    )
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    lm = scripted([0, 1, 2, 0, 3, 4, 5, 6, 1], tokenizer=Tokenizer(backend), vocab_size=7)
    assert generate(lm, [[0]], max_new_tokens=8).text == [" bc a 日 b"]
    assert_pieces_make_the_result(lm, [[0]], max_new_tokens=8)


def test_the_result_of_a_stream_comes_at_its_end(byte_tokenizer):
    lm = scripted("abc", tokenizer=byte_tokenizer)
    running = stream(lm, "a", max_new_tokens=2)
    next(running)
    with pytest.raises(RuntimeError, match="after the last piece"):
        _ = running.result
    assert list(running) and running.result.text == ["bc"]


def test_half_a_character_is_refused(byte_tokenizer):
    """A lone surrogate, which no text of bytes has, wherever a text is given."""
    lm, half = scripted("abc", tokenizer=byte_tokenizer), "caf\udce9"
    calls: list[Any] = [
        lambda: generate(lm, half, max_new_tokens=2),
        lambda: generate(lm, "a", max_new_tokens=2, stop=half),
        lambda: stream(lm, [half], max_new_tokens=2),
        lambda: lm.tokenizer.encode(half),
        lambda: kvjax.score(lm, "a", half),
    ]
    for call in calls:
        with pytest.raises(
            ValueError, match=r"is not valid Unicode: character 3 is a lone surrogate, U\+DCE9"
        ):
            call()


OTHERS = {
    "NumPy, no axes": np.asarray,
    "NumPy scalars": lambda x: np.asarray(x)[()],
    "JAX": jnp.asarray,
}
"""Numbers as other libraries have them, of Python's own."""


@pytest.mark.slow(but=("JAX",))
@pytest.mark.parametrize("of", OTHERS.values(), ids=OTHERS)
def test_numbers_of_other_libraries(tiny_llama, of):
    """They are Python's own numbers: in generation, in an engine and in policies."""
    numbers: dict[str, Any] = {
        "max_new_tokens": 4, "max_len": 32, "seed": 3, "temperature": 0.5, "top_k": 4,
        "top_p": 0.75, "min_p": 0.125, "typical_p": 0.75, "repetition_penalty": 1.25,
        "frequency_penalty": 0.25, "presence_penalty": 0.5, "no_repeat_ngram_size": 2,
        "min_new_tokens": 2, "logprobs": 1, "eos_token_ids": 5, "n": 2, "prefill_chunk": 16,
    }  # fmt: skip
    wanted = generate(tiny_llama, "a", logit_bias={5: 0.5}, **numbers)
    given = {name: of(value) for name, value in numbers.items()}
    assert generate(tiny_llama, "a", logit_bias={5: of(0.5)}, **given).tokens == wanted.tokens
    rows = numbers | {"n": 1}
    wanted = generate(tiny_llama, ["a"] * 2, **rows | {"seed": [3, 9]})
    for seed in ([of(3), of(9)], of([3, 9])):
        found = generate(tiny_llama, ["a"] * 2, **rows | {"seed": seed})
        assert found.tokens == wanted.tokens
    beams = {"max_new_tokens": 3, "num_beams": 2, "length_penalty": 0.5}
    wanted = generate(tiny_llama, "a", **beams)
    found = generate(tiny_llama, "a", **{name: of(value) for name, value in beams.items()})
    assert found.tokens == wanted.tokens
    make: list[Any] = [
        lambda f: kvjax.policy(bits=f(4), group_size=f(32), block=f(64), recent=f(1)),
        lambda f: kvjax.policy("sliding_window", window=f(8), sinks=f(1), slack=f(4)),
        lambda f: kvjax.policy("paged", page_size=f(16), pages=f(8)),
        lambda f: kvjax.policy("offloaded", prefetch=f(1)),
        lambda f: kvjax.CachePolicy(Growing(f(16)), Integer(f(8), "token", f(16))),
        lambda f: InferenceLimits(max_batch_size=f(2), max_seq_len=f(64)),
    ]
    for each in make:
        assert each(of) == each(int) and hash(each(of)) == hash(each(int))
        assert repr(each(of)) == repr(each(int))


def test_a_cache_without_room_is_told_by_its_size(tiny_llama):
    words = r"cache does not fit in memory: 2 row\(s\) of .* tokens take .* (TB|PB)"
    for policy in ("static", "offloaded_static"):
        with pytest.raises(kvjax.CacheMemoryError, match=words):
            generate(tiny_llama, ["a", "b"], max_new_tokens=10**9, cache=policy)
    with pytest.raises(MemoryError, match=words):
        kvjax.init_cache(tiny_llama.config, batch=2, max_len=10**10)


# Caches and capacities


def test_a_cache_is_continued(tiny_llama):
    settings = {"max_len": 64, **SHARED}
    whole = generate(tiny_llama, PROMPTS, max_new_tokens=14, **settings)
    first = generate(tiny_llama, PROMPTS, max_new_tokens=6, **settings)
    kept = kvjax.fork(first.cache)
    second = generate(
        tiny_llama, first.pending_tokens, cache=first.cache, max_new_tokens=8, **SHARED
    )
    assert [a + b for a, b in zip(first.tokens, second.tokens, strict=True)] == whole.tokens
    np.testing.assert_array_equal(second.cache.length, whole.cache.length)
    assert first.cache.layers[0].keys.is_deleted()  # donated
    again = generate(tiny_llama, first.pending_tokens, cache=kept, max_new_tokens=8, **SHARED)
    assert again.tokens == second.tokens


def test_a_cache_that_another_call_used_up_meanwhile(tiny_llama):
    """After it was looked at, by a stream that has not begun, or in another thread."""
    settings = {"max_new_tokens": 3, "eos_token_ids": ()}
    cache = kvjax.generate(tiny_llama, ["ab"], max_len=64, **settings).cache
    for more in ({}, {"num_beams": 2}):
        later = kvjax.stream(tiny_llama, ["c"], cache=cache, **settings, **more)
        cache = kvjax.generate(tiny_llama, ["c"], cache=cache, **settings).cache
        with pytest.raises(ValueError, match="was used up by an earlier call"):
            next(later)

    def go_on(_):
        try:
            return kvjax.generate(tiny_llama, ["c"], cache=cache, **settings).tokens
        except ValueError as error:
            return str(error)

    for _ in range(4):
        cache = kvjax.generate(tiny_llama, ["ab"], max_len=64, **settings).cache
        *refused, _ = sorted(together(4, go_on), key=lambda found: isinstance(found, list))
        assert all("was used up by an earlier call" in each for each in refused), refused


def test_a_continued_text_has_no_second_beginning(byte_tokenizer):
    asked = []

    class Recording(Tokenizer):
        def encode(self, text, *, add_special_tokens=True):
            asked.append(add_special_tokens)
            return super().encode(text, add_special_tokens=add_special_tokens)

    lm = scripted("abcdefgh", tokenizer=Recording(byte_tokenizer.backend))
    asked.clear()
    first = generate(lm, "a", max_new_tokens=2)
    second = generate(lm, "cd", cache=first.cache, max_new_tokens=3)
    assert asked == [True, False]
    assert second.text == ["efg"]
    generate(lm, "a", cache=kvjax.init_cache(lm.config, max_len=64), max_new_tokens=2)
    assert asked == [True, False, True]  # an empty cache holds no beginning yet


# Log-probabilities, and biases


@pytest.mark.slow(but=("uncached",))
@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3, "n": 2}, {"use_cache": False}],
    ids=["greedy", "drawn twice", "uncached"],
)
def test_log_probabilities_are_the_models_own(tiny_llama, settings):
    """Whatever is drawn from; and of a stream's pieces the same."""
    given = {"max_new_tokens": 6, "logprobs": 3, **SHARED, **settings}
    result, apply = generate(tiny_llama, PROMPTS, **given), jax.jit(tiny_llama.architecture.apply)
    prompts = [prompt for prompt in PROMPTS for _ in range(settings.get("n", 1))]
    assert result.logprobs is not None
    for prompt, new, scores in zip(prompts, result.tokens, result.logprobs, strict=True):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(prompt) + 6] = prompt + new
        known = np.asarray(jax.nn.log_softmax(apply(tiny_llama.params, tokens)[0]))
        for token, score, line in zip(new, scores, known[len(prompt) - 1 :], strict=False):
            assert abs(score.logprob - line[token]) < 1e-5
            ids, logprobs = zip(*score.top_logprobs, strict=True)
            np.testing.assert_allclose(logprobs, np.sort(line)[:-4:-1], atol=1e-5)
            np.testing.assert_allclose(line[list(ids)], logprobs, atol=1e-5)
    pieces: list[list[Any]] = [[] for _ in prompts]
    for piece in stream(tiny_llama, PROMPTS, **given):
        for row, scores in zip(pieces, piece.logprobs, strict=True):
            row += scores
    assert pieces == result.logprobs


def test_log_probabilities_end_where_the_text_does(byte_tokenizer):
    lm = scripted("one two three", tokenizer=byte_tokenizer)
    result = generate(lm, "a", max_new_tokens=13, stop="two", logprobs=0, **SHARED)
    assert result.text == ["ne "] and len(result.logprobs[0]) == len(result.tokens[0]) == 3
    assert all(score.top_logprobs == () for score in result.logprobs[0])
    for piece in stream(lm, "a", max_new_tokens=13, stop="two", logprobs=0, **SHARED):
        assert len(piece.logprobs[0]) == len(piece.tokens[0])
    assert generate(lm, "a", max_new_tokens=3, **SHARED).logprobs is None


def test_a_bias_forbids_tokens_and_forces_them(tiny_llama):
    free = generate(tiny_llama, PROMPTS, max_new_tokens=6, **SHARED).tokens
    banned = dict.fromkeys({token for row in free for token in row}, -1e6)
    other = generate(tiny_llama, PROMPTS, max_new_tokens=6, logit_bias=banned, **SHARED).tokens
    assert not {token for row in other for token in row} & set(banned)
    forced = generate(tiny_llama, PROMPTS, max_new_tokens=6, logit_bias={9: 1e6}, **SHARED)
    assert forced.tokens == [[9] * 6] * 3
    other = generate(tiny_llama, PROMPTS, max_new_tokens=6, logit_bias={8: 1e6}, **SHARED)
    assert other.tokens == [[8] * 6] * 3 and other.stats.compilations == 0


def test_capacities_and_widths():
    expected = {1: 64, 64: 64, 65: 96, 96: 96, 97: 128, 128: 128, 129: 192, 193: 256, 3000: 3072}
    assert {n: capacity_bucket(n) for n in expected} == expected
    assert [padded_width(n, 100) for n in (1, 16, 17, 64, 65, 100)] == [16, 16, 32, 64, 100, 100]
    assert padded_width(3, 5) == 5


def test_the_capacity_of_the_cache(byte_tokenizer):
    lm = scripted("abc", tokenizer=byte_tokenizer, position_limit=70)
    assert generate(lm, "a", max_new_tokens=2).cache.max_len == 64
    assert generate(lm, "a", max_new_tokens=65).cache.max_len == 70
    assert generate(lm, "a", max_new_tokens=2, max_len=3).cache.max_len == 3
    # Of ``prefill`` there is room to go on, where there can be.
    assert kvjax.prefill(lm, "a" * 64)[0].max_len == kvjax.prefill(lm, "a" * 70)[0].max_len == 70
    assert kvjax.prefill(lm, "a" * 64, max_len=64)[0].max_len == 64


def test_a_chunk_padded_past_the_capacity_loses_nothing(tiny_llama):
    prompt = [list(range(30, 51))]
    exact = generate(tiny_llama, prompt, max_new_tokens=4, max_len=25, eos_token_ids=())
    roomy = generate(tiny_llama, prompt, max_new_tokens=4, max_len=64, **SHARED)
    assert exact.tokens == roomy.tokens


def test_a_policy_for_each_layer_and_a_dtype(tiny_llama):
    policy = kvjax.policy("static", dtype="bfloat16")
    settings = {"max_new_tokens": 4, "max_len": 64, **SHARED}
    one = generate(tiny_llama, PROMPTS, cache=policy, **settings)
    two = generate(tiny_llama, PROMPTS, cache=[policy, kvjax.policy("static")], **settings)
    full = generate(tiny_llama, PROMPTS, **settings)
    assert one.stats.cache_bytes["device"] * 2 == full.stats.cache_bytes["device"]
    assert one.stats.cache_bytes["device"] < two.stats.cache_bytes["device"]
    assert full.stats.cache_bytes == kvjax.nbytes(full.cache)


def test_the_figures(tiny_llama):
    stats = generate(tiny_llama, PROMPTS, max_new_tokens=5, **SHARED).stats
    assert dataclasses.asdict(stats).keys() == {
        "prompt_tokens", "new_tokens", "compile_seconds", "prefill_seconds", "decode_seconds",
        "decode_tokens_per_second", "cache_bytes", "compilations", "finish_reasons", "moves",
        "beyond_context", "cached_tokens", "speculation",
    }  # fmt: skip
    assert stats.prompt_tokens == sum(map(len, PROMPTS)) and stats.new_tokens == 15
    assert stats.decode_tokens_per_second == pytest.approx(12 / stats.decode_seconds)


def test_a_model_without_a_tokenizer():
    lm = scripted([1, 2, 3, 4], tokenizer=None, vocab_size=8)
    result = generate(lm, [[1]], max_new_tokens=3)
    assert (result.text, result.tokens) == (None, [[2, 3, 4]])
    pieces = list(stream(lm, [[1]], max_new_tokens=3))
    assert all(piece.text is None for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens[0]] == [2, 3, 4]


# The copy law


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_the_loop_moves_no_cache(tiny_llama, settings):
    filters, numbers = prepare_sampling(seeds=[0, 1], eos_token_ids=(EOS,), **settings)
    rows: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    flags: Any = jax.ShapeDtypeStruct((2,), bool)
    temporary = []
    for max_len in (8192, 32768):
        config = dataclasses.replace(tiny_llama.config, max_position_embeddings=max_len)
        architecture = dataclasses.replace(tiny_llama.architecture, config=config)
        cache = jax.eval_shape(
            lambda config=config, n=max_len: kvjax.init_cache(config, batch=2, max_len=n)
        )
        program: Any = programs.decode.lower(
            architecture,
            filters,
            architecture.abstract_params(),
            programs.Cached(cache),
            programs.Progress(rows, rows, flags, flags),
            None,
            flags,
            numbers,
            np.int32(50),
            np.int32(40),
        ).compile()
        size = kvjax.nbytes(cache)["device"]
        assert_no_copy(program, size, size // config.num_hidden_layers)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


# Bad input


@pytest.mark.parametrize("where", [4, 7])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("use_cache", [True, False])
def test_logits_that_are_no_numbers_are_raised_not_drawn_from(
    byte_tokenizer, where, bad, use_cache
):
    lm = scripted(
        "abcdefghij", "abcdefghij", "abcdefghij",
        tokenizer=byte_tokenizer, scale={(1, where): bad},
    )  # fmt: skip
    running = stream(lm, ["abcd"] * 3, max_new_tokens=6, use_cache=use_cache)
    shown = [""] * 3
    with pytest.raises(kvjax.NonFiniteError, match=r"row\(s\) 1 are not finite"):
        for piece in running:
            shown = [old + new for old, new in zip(shown, piece.text, strict=True)]
    assert "efghij"[: where - 4].startswith(shown[1])
    with pytest.raises(kvjax.NonFiniteError, match=f"after {where - 4} new tokens"):
        generate(lm, ["abcd"] * 3, max_new_tokens=6, temperature=1.0, use_cache=use_cache)
    # A row that has ended is not looked at.
    if where > 4:
        generate(lm, ["abcd"] * 3, max_new_tokens=where - 4, use_cache=use_cache)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("", {}, "prompt 0 is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([], {}, "no prompts"),
        ([[1, 258]], {}, r"prompt 0: token id 258 is out of range: .* 258 tokens, 0 to 257"),
        ([[-1]], {}, "token id -1 is out of range"),
        ([1, 2], {}, "prompt 0 must be a string or a list of token ids, got 1"),
        ([[1.5]], {}, "prompt 0 must be a string or a list of token ids"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens must be .* >= 1, got 0"),
        ("a", {"max_new_tokens": -3}, "max_new_tokens must be .* >= 1, got -3"),
        ("a", {"min_new_tokens": -1}, "min_new_tokens must be .* >= 0, got -1"),
        ("a", {"min_new_tokens": 9}, "min_new_tokens is 9, but max_new_tokens is only 5"),
        ("a", {"prefill_chunk": 0}, "prefill_chunk must be"),
        ("a", {"max_len": 0}, "max_len must be"),
        (["a", "abcdef"], {"max_len": 9}, "6 tokens of prompt and max_new_tokens=5 need 10 pos"),
        (["a", "abcdef"], {"max_len": 9}, "but max_len is 9"),
        ("a" * 97, {}, "need 101 positions, but the model has only 100"),
        ("a", {"max_len": 200}, "max_len is 200, but the model has only 100 positions"),
        ("a", {"top_p": 0}, "top_p must be"),
        ("a", {"logprobs": -1}, "logprobs must be an integer >= 0"),
        ("a", {"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ("a", {"logit_bias": {999: 1.0}}, "logit_bias: token id 999 is out of range"),
        ("a", {"logit_bias": {1: 1e9}}, "logit_bias must be numbers from -1e6 to 1e6"),
        ("a", {"logit_bias": {1: np.nan}}, "logit_bias must be numbers .*, got nan"),
        ("a", {"logit_bias": {1.5: 1}}, "a token of logit_bias must be an integer"),
        ("a", {"logit_bias": [1]}, r"logit_bias must map token ids to numbers, got \[1\]"),
        ("a", {"temperature": -1}, "temperature must be"),
        (["a", "b"], {"seed": [1]}, "1 seeds for 2 rows"),
        ("a", {"cache": "dynamical"}, "unknown cache policy 'dynamical'"),
        ("a", {"cache": None}, "cache is None: give a policy, its name or a KVCache"),
        ("a", {"stop": ""}, "a stop string must have at least one character, got ''"),
        ("a", {"eos_token_ids": [300]}, "eos_token_ids: token id 300 is out of range"),
    ],
    ids=str,
)
@pytest.mark.parametrize("entry", [generate, stream])
def test_bad_requests_are_refused_before_anything_runs(
    byte_tokenizer, prompts, settings, message, entry
):
    lm = scripted("abc", "abc", tokenizer=byte_tokenizer, position_limit=100)
    lm.architecture = None  # nothing may run
    with pytest.raises(ValueError, match=message):
        entry(lm, prompts, **{"max_new_tokens": 5} | settings)


def test_bad_requests_of_a_continuation(byte_tokenizer):
    lm = scripted("abc", "abc", tokenizer=byte_tokenizer)
    cache = generate(lm, "ab", max_new_tokens=5, max_len=8).cache
    assert cache.length.tolist() == [6]
    with pytest.raises(ValueError, match="7 tokens of prompt and max_new_tokens=3 need 9 pos"):
        generate(lm, "c", cache=cache, max_new_tokens=3)
    with pytest.raises(ValueError, match="the cache has 1 rows, but there are 2 prompts"):
        generate(lm, ["a", "b"], cache=cache, max_new_tokens=1)
    with pytest.raises(ValueError, match="max_len is 9, but the given cache's capacity is 8"):
        generate(lm, "a", cache=cache, max_len=9, max_new_tokens=1)
    with pytest.raises(ValueError, match="use_cache=False"):
        generate(lm, "a", cache=cache, use_cache=False, max_new_tokens=1)
    spoilt = dataclasses.replace(cache, status=cache.status | 1)
    with pytest.raises(kvjax.CacheOverflowError):
        generate(lm, "c", cache=spoilt, max_new_tokens=1)
    assert generate(lm, "c", cache=cache, max_new_tokens=1).cache.length.tolist() == [7]


def test_texts_need_a_tokenizer():
    lm = scripted([1, 2, 3], tokenizer=None, vocab_size=8)
    with pytest.raises(ValueError, match="no tokenizer: give prompts as lists of token ids"):
        generate(lm, "a")
    with pytest.raises(ValueError, match="no tokenizer, so stop strings"):
        generate(lm, [[1]], stop="a")


def test_signatures_show_every_setting(tiny_llama):
    """As the type checker sees them, with the defaults that are used; any other is refused."""
    known = inspect.signature(options.GenerationOptions).parameters
    assert known.keys() == options.GenerateKeywords.__annotations__.keys()
    assert get_type_hints(options.GenerationOptions) == get_type_hints(options.GenerateKeywords)
    for function, keywords in (
        (generate, options.GenerateKeywords), (stream, options.GenerateKeywords),
        (kvjax.generate_batches, options.GenerateKeywords),
        (kvjax.compile, options.CompileKeywords),
        (kvjax.bench.measure, SamplingKeywords),
    ):  # fmt: skip
        shown = inspect.signature(function).parameters
        for name in keywords.__annotations__:
            assert shown[name].default == known[name].default
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'beams'"):
            function(tiny_llama, ["a"], beams=2)


def test_what_is_no_model_is_told(tiny_llama):
    class Bare:
        config = params = mesh = tokenizer = generation = on = architecture = None

    @dataclasses.dataclass
    class Mutable:
        width: int = 8

    for wrong, message in {
        "gpt2": r"expected a model, as kvjax\.models\.load returns, got a str: it has no config",
        Bare(): "the model's config has no vocab_size: generation needs",
    }.items():
        with pytest.raises(ValueError, match=message):
            kvjax.generate(wrong, [[1]], max_new_tokens=1)
    other = dataclasses.replace(tiny_llama, architecture=Mutable())
    with pytest.raises(ValueError, match=r"lm\.architecture is not hashable.*a frozen dataclass"):
        kvjax.generate(other, [[1]], max_new_tokens=1)
    with pytest.raises(ValueError, match="generation can't run inside jit"):
        jax.jit(lambda: kvjax.generate(tiny_llama, [[1]], max_new_tokens=1).tokens)()
    with pytest.raises(ValueError, match=r"a model's config is needed.*: give its \.config"):
        kvjax.init_cache(tiny_llama, max_len=8)
    assert len(repr(tiny_llama)) < 200 and "2 layers" in repr(tiny_llama)


def test_a_config_with_the_names_of_transformers_alone(tiny_llama):
    """Of a model of one's own: what it leaves out is what it is there."""
    known = tiny_llama.config
    config = types.SimpleNamespace(
        vocab_size=known.vocab_size, position_limit=None, dtype="float32",
        num_hidden_layers=known.num_hidden_layers, num_attention_heads=known.num_attention_heads,
        num_key_value_heads=known.num_key_value_heads, head_dim=None,
        hidden_size=known.head_dim * known.num_attention_heads,
        max_position_embeddings=8,
    )  # fmt: skip
    own = dataclasses.replace(tiny_llama, config=config)
    settings = {"max_new_tokens": 4, "max_len": 64, **SHARED}
    found = generate(own, PROMPTS, **settings)
    assert found.tokens == generate(tiny_llama, PROMPTS, **settings).tokens
    assert found.stats.beyond_context == max(map(len, PROMPTS)) + 4 - 8


def test_a_model_on_another_device_than_the_default_one(tiny_llama):
    """Its weights would be moved at every call."""
    other = jax.devices()[1]
    away = dataclasses.replace(tiny_llama, params=jax.device_put(tiny_llama.params, other))
    settings = {"max_new_tokens": 3, **SHARED}
    with pytest.raises(ValueError, match=r"the model is on .*1.* call this inside jax"):
        kvjax.generate(away, PROMPTS, **settings)
    with pytest.raises(ValueError, match=r"call this inside jax\.default_device"):
        kvjax.evaluate(away, [1, 2, 3], {}, context=2)
    with jax.default_device(other):
        found = kvjax.generate(away, PROMPTS, **settings)
    assert found.tokens == kvjax.generate(tiny_llama, PROMPTS, **settings).tokens


@pytest.mark.slow
def test_a_cache_given_that_is_too_small_can_be_grown(tiny_llama):
    cache = kvjax.generate(tiny_llama, [[1, 2]], max_new_tokens=2, max_len=8).cache
    with pytest.raises(ValueError, match=r"capacity is 8: call kvjax\.grow\(cache, 11\)"):
        kvjax.generate(tiny_llama, [[3]], max_new_tokens=8, cache=cache)
    grown = kvjax.grow(cache, 11)
    assert kvjax.generate(tiny_llama, [[3]], max_new_tokens=8, cache=grown).stats.new_tokens


def _in_tree(lm, prompts, **settings):
    tree = kvjax.PrefixTree(lm, "paged", pages=12, max_len=64, prefill_chunk=16)
    del settings["prefill_chunk"]
    return generate(lm, prompts, prefix_cache=tree, **settings)


def _rolled_out(lm, prompts, **settings):
    del settings["prefill_chunk"]
    found = kvjax.rollout(lm, lm.params, prompts, temperature=0, **settings).check()
    both = zip(found.new_tokens.tolist(), found.lengths.tolist(), strict=True)
    return types.SimpleNamespace(tokens=[ids[:count] for ids, count in both])


WAYS: dict[str, Any] = {
    "static": generate,
    "of its length": lambda *args, **more: generate(*args, max_len=64, **more),
    "without a cache": lambda *args, **more: generate(*args, use_cache=False, **more),
    "dynamic": lambda *args, **more: generate(*args, cache="dynamic", **more),
    "samples in pages": lambda *args, **more: generate(*args, cache="paged", n=2, **more),
    "beams": lambda *args, **more: generate(*args, num_beams=2, **more),
    "penalized drafts": lambda *args, **more: generate(
        *args, draft="lookup", no_repeat_ngram_size=64, **more
    ),
    "in a tree": _in_tree,
    "rolled out": _rolled_out,
}


OFTEN = ("static", "of its length", "without a cache", "beams")


@pytest.mark.parametrize(
    "way", [pytest.param(x, marks=[pytest.mark.rare] * (x not in OFTEN)) for x in WAYS]
)
def test_the_last_new_token_needs_no_position(tiny_llama, way):
    """Where the model has 64 positions, 60 tokens of prompt and 5 new ones fit, and 6 do not."""
    config = types.SimpleNamespace(**vars(tiny_llama.config), position_limit=64)
    lm: Any = dataclasses.replace(tiny_llama, config=config)
    every = jax.jit(lm.architecture.apply)
    for held, new in ((60, 5), (64, 1)) if WAYS[way] is generate else ((60, 5),):
        prompt = [(7 * n) % 250 for n in range(held)]
        ids = WAYS[way](lm, [prompt], max_new_tokens=new, **SHARED).tokens[0]
        assert len(ids) == new
        if way != "beams":
            logits = every(lm.params, np.array([(prompt + ids)[:64]], np.int32))
            assert ids == jnp.argmax(logits[0, held - 1 :], axis=-1).tolist()
        with pytest.raises(ValueError, match=r"need 65 positions, but .* 64"):
            WAYS[way](lm, [prompt], max_new_tokens=new + 1, **SHARED)


def test_a_layers_number_is_not_traced():
    cache = kvjax.init_cache(tiny_config(), batch=1, max_len=8)
    one = jnp.zeros((1, 2, 1, 8))
    with pytest.raises(
        ValueError, match="the layer number is traced, but the layers are not stacked"
    ):
        jax.jit(kvjax.append)(cache, 0, one, one)
