"""Texts that keep to guides: by generate, by stream, beside others, and as an engine has them."""

import copy
import functools
import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jsonschema
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax import models
from kvjax.generation.guides.masks import mask_words
from kvjax.layouts import Growing
from kvjax.memory import InferenceLimits
from kvjax.models.text import Tokenizer
from kvjax.sampling.filters import ALL_ALLOWED
from tests.checkpoints import write_llama
from tests.matrix import some
from tests.schemas import random_schema
from tests.test_engine import Letters
from tests.test_prefixes import small

# Guides of the test's own.


@functools.cache
def shallow():
    """A model of one layer, for each is one more to compile."""
    return replace(small(num_hidden_layers=1, windows=(None,)), tokenizer=Letters())


class Anything:
    """What allows all, and knows what has come."""

    def __init__(self, vocabulary=61):
        self.words, self.tokens = -(-vocabulary // 32), []

    def copy(self):
        return copy.deepcopy(self)

    def allowed(self):
        return np.full(self.words, ALL_ALLOWED, np.uint32)

    def accept(self, token):
        self.tokens.append(token)


class Text(Anything):
    """What allows one text alone."""

    def __init__(self, tokens):
        super().__init__()
        self.left = list(tokens)

    def allowed(self):
        words = np.zeros(self.words, np.uint32)
        words[self.left[0] // 32] |= np.uint32(1 << self.left[0] % 32)
        return words

    def accept(self, token):
        super().accept(token)
        assert token == self.left.pop(0)


POLICIES: dict[str, Any] = {
    "static": "static",
    "4 bits": kvjax.policy(bits=4, group_size=8, block=8),
    "dynamic": kvjax.CachePolicy(Growing(start=16)),
    "sliding_window": kvjax.policy("sliding_window", window=20, sinks=2, slack=20),
    "offloaded": kvjax.policy("offloaded_static", block=8),
    "paged": kvjax.policy("paged", page_size=16),
}
WAYS = ("none", "prefixes", "mesh", *POLICIES)
SAMPLED: dict[str, Any] = {
    "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2,
    "no_repeat_ngram_size": 3, "logprobs": 2, "stop": ["xy", "Q"], "max_new_tokens": 24,
    "eos_token_ids": (7,), "seed": 5,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", some(WAYS, "static"))
def test_a_guide_that_allows_everything_changes_nothing(way):
    """Nor does one for the row beside; and each has taken in all tokens, those behind a stop string
    as well. Some rows are free."""
    lm, prompts = shallow(), [[1, 2, 3] * 6, [9], [30, 31, 32, 33]]
    given: dict[str, Any] = {"cache": POLICIES.get(way, "static")}
    if way == "none":
        given = {"use_cache": False}
    elif way == "mesh":
        lm = lm.on(kvjax.make_mesh(data=2, tensor=2))
    guides = [Anything(), None, Anything()]
    found = []
    for guide in (None, guides):
        if way == "prefixes":
            given = {"prefix_cache": kvjax.PrefixTree(lm, pages=40, max_len=64, prefill_chunk=16)}
        found.append(kvjax.generate(lm, prompts, n=2, guide=guide, **SAMPLED, **given))
    plain, guided = found
    assert guided.tokens == plain.tokens and guided.text == plain.text
    assert guided.pending_tokens == plain.pending_tokens
    assert guided.stats.finish_reasons == plain.stats.finish_reasons
    assert {"length", "stop"} <= set(plain.stats.finish_reasons)
    for mine, other in zip(guided.logprobs, plain.logprobs, strict=True):
        for name in ("logprob", "sampling_logprob"):
            values = [[getattr(each, name) for each in scores] for scores in (mine, other)]
            np.testing.assert_allclose(*values, atol=1e-5)
    assert all(guide.tokens == [] for guide in guides if guide is not None)
    for row, (guide, tokens) in enumerate(zip(guided.guides, guided.tokens, strict=True)):
        assert (guide is None) == (row // 2 == 1)
        if guide is not None:
            assert guide.tokens[: len(tokens)] == tokens
    if plain.cache is not None and way != "mesh":
        assert guided.cache.length.tolist() == plain.cache.length.tolist()
        both = (
            kvjax.generate(lm, [[*left, 5] for left in each.pending_tokens],
                           cache=each.cache, guide=guide, **SAMPLED | {"max_new_tokens": 4})
            for each, guide in ((plain, None), (guided, Anything()))
        )  # fmt: skip
        assert len({str(each.tokens) for each in both}) == 1


def test_rows_keep_to_their_texts_as_they_stream():
    """Whatever they would like; a piece a token."""
    lm, texts = shallow(), [[5, 60, 31, 32, 7], [0, 33, 7], [59] * 9]
    settings: dict[str, Any] = {"eos_token_ids": (7,), "max_new_tokens": 9, "temperature": 2.0}
    prompts = [[1, 2], [3], [4, 5, 6]]
    running = kvjax.stream(lm, prompts, guide=[Text(text) for text in texts], **settings)
    rows: list[list[int]] = [[], [], []]
    for piece in running:
        for row, tokens in zip(rows, piece.tokens, strict=True):
            assert len(tokens) <= 1
            row += tokens
    assert rows == running.result.tokens == texts
    assert running.result.stats.finish_reasons == ("eos", "eos", "length")


class Even(Anything):
    """What allows even tokens, and 7, which ends a text."""

    def allowed(self):
        return np.array([0x55555555 | 1 << 7, 0x55555555], np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "lookup"])
@pytest.mark.parametrize("way", some(WAYS[1:], "static"))
def test_drafts_of_rows_with_guides(way, kind):
    """Texts, guides and caches are those without drafts, whether rows agree with them or not."""
    lm, prompts = shallow(), [[2, 4, 6] * 6, [9], [30, 31, 32, 33], [8, 8, 8]]
    guides = [Even(), None, Anything(), Text([5, 60, 5, 60, 5, 60, 31, 7])]
    if way == "mesh":
        lm = lm.on(kvjax.make_mesh(data=2, tensor=2))
    own = replace(shallow(), params=jax.tree.map(lambda x: 1.03 * x, shallow().params))
    draft = {
        "model": kvjax.DraftModel(own, 4, adaptive=False),
        "lookup": kvjax.PromptLookup(4, min_ngram=1, adaptive=kind == way),
    }[kind]
    found = []
    for given in (None, draft):
        cache: dict[str, Any] = {"cache": POLICIES.get(way, "static")}
        if way == "prefixes":
            tree = kvjax.PrefixTree(lm, pages=60, max_len=64, prefill_chunk=16)
            cache = {"prefix_cache": tree}
        found.append(
            kvjax.generate(lm, prompts, n=2, guide=guides, draft=given, **SAMPLED, **cache)
        )
    plain, drafted = found
    assert drafted.tokens == plain.tokens and drafted.pending_tokens == plain.pending_tokens
    assert drafted.stats.finish_reasons == plain.stats.finish_reasons
    for mine, other in zip(drafted.guides, plain.guides, strict=True):
        assert (mine is None) == (other is None)
        # Behind a stop string one may have come further.
        assert mine is None or [*zip(mine.tokens, other.tokens, strict=False)] == [
            *zip(other.tokens, mine.tokens, strict=False)
        ]
    stats = drafted.stats.speculation
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    if plain.cache is not None:
        assert np.array_equal(drafted.cache.length, plain.cache.length)
    running = kvjax.stream(shallow(), prompts[3:], guide=guides[3:], draft=draft, max_new_tokens=8)
    assert [token for piece in running for token in piece.tokens[0]] == guides[3].left


@pytest.mark.slow
def test_a_draft_that_ends_a_text_asks_for_nothing_behind_it():
    """In a generation, and in an engine."""
    lm, text = shallow(), [3, 9, 1, 5, 8]
    settings: dict[str, Any] = {"max_new_tokens": 12, "eos_token_ids": (8,)}
    draft = kvjax.PromptLookup(4, min_ngram=1, adaptive=False)
    prompt = [*text, 2, 2, 3, 9, 1, 5, 8, 4]
    found = kvjax.generate(lm, [prompt], guide=Text(text), draft=draft, **settings)
    assert found.tokens == [text] and found.stats.speculation.accepted_tokens == 3
    engine = engine_of(lm)
    guide = Text(text)
    first, second = engine.run([prompt, prompt], guide=guide, draft=draft, **settings)
    assert first.tokens == second.tokens == text and guide.tokens == []
    assert (first.finish_reason, second.finish_reason) == ("eos", "eos")


def test_the_best_samples_have_their_own_guides():
    found = kvjax.generate(
        shallow(), [[2], [3]], best_of=4, n=2, guide=Anything(), temperature=1.0, max_new_tokens=6
    )
    assert [guide.tokens for guide in found.guides] == found.tokens


@pytest.mark.slow
def test_a_guide_that_fails_for_ever_keeps_no_pages():
    class Broken(Anything):
        def accept(self, token):
            raise RuntimeError("a user's")

    lm = shallow()
    tree = kvjax.PrefixTree(lm, pages=40, max_len=64, prefill_chunk=16)
    with pytest.raises(RuntimeError, match="a user's"):
        kvjax.generate(lm, [[1, 2]], guide=Broken(), prefix_cache=tree, max_new_tokens=4)
    assert kvjax.generate(lm, [[1, 2]], prefix_cache=tree, max_new_tokens=4).tokens


# Grammars.

POINT = {
    "type": "object", "properties": {"x": {"enum": [0, 1]}, "name": {"enum": ["a", "bé"]}},
    "required": ["x", "name"], "additionalProperties": False,
}  # fmt: skip
KINDS: tuple[tuple[str, Any, str], ...] = (
    ("json_schema", POINT, r'\{"x":[01],"name":"(a|bé)"\}'),
    ("json_schema", json.dumps(POINT), r'\{"x":[01],"name":"(a|bé)"\}'),
    ("regex", "[ab]{3}c", "[ab]{3}c"),
    ("choices", ['yes "x"', "no|\\"], r'yes "x"|no\|\\'),
    ("grammar", 'start: "q" /[0-9]/ "w"', "q[0-9]w"),
)
LONG: dict[str, Any] = {"max_new_tokens": 64, "max_len": 96, "temperature": 1.0}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    """Of one layer as well."""
    folder = write_llama(tmp_path_factory.mktemp("one") / "llama", num_hidden_layers=1)
    return models.load(str(folder), dtype="float32")


@functools.cache
def engine_of(lm):
    limits = InferenceLimits(max_batch_size=4, max_seq_len=96)
    return kvjax.Engine(lm, limits=limits, prefill_chunk=16, decode_steps=4)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.rare), 1.0])
def test_guides_of_every_kind(tiny_llama, temperature):
    """In a batch with a free row, which is what it is alone; piece by piece; by an engine."""
    made = kvjax.Guides(tiny_llama)
    guides = [getattr(made, name)(value) for name, value, _ in KINDS]
    prompts, settings = [*"abcde", "free"], LONG | {"temperature": temperature, "prefill_chunk": 16}
    found = kvjax.generate(tiny_llama, prompts, guide=[*guides, None], **settings)
    drafted = kvjax.generate(
        tiny_llama,
        prompts,
        guide=[*guides, None],
        draft=kvjax.DraftModel(tiny_llama, 3, adaptive=False),
        **settings,
    )
    assert drafted.tokens == found.tokens and drafted.stats.speculation.accepted_tokens > 0
    running = kvjax.stream(tiny_llama, prompts, guide=[*guides, None], **settings)
    pieces = [piece.text for piece in running]
    assert ["".join(texts) for texts in zip(*pieces, strict=True)] == found.text
    assert running.result.tokens == found.tokens
    assert len(pieces) >= 64
    engine = engine_of(tiny_llama)
    for draft in (None, kvjax.PromptLookup(min_ngram=1, adaptive=False)):
        handles = [
            engine.submit(
                prompt, guide=guide and guide.copy(), seed=seed, max_new_tokens=64,
                temperature=temperature, draft=draft,
            )
            for seed, (prompt, guide) in enumerate(zip(prompts, [*guides, None], strict=True))
        ]  # fmt: skip
        while engine.step():
            pass
        assert [(each.tokens, each.text) for each in handles] == [
            *zip(found.tokens, found.text, strict=True)
        ]
    assert engine.stats().drafted_tokens > engine.stats().accepted_tokens
    with pytest.raises(ValueError, match=r"draft needs a guide with copy\(\)"):
        once = SimpleNamespace(allowed=None, accept=None)
        engine.submit("a", guide=once, draft="lookup")  # type: ignore[arg-type]
    both = zip(KINDS, found.text, found.stats.finish_reasons, strict=False)
    for (name, _, pattern), text, reason in both:
        assert re.fullmatch(pattern, text) and reason == "eos", (name, text)
    assert [guide.error for guide in found.guides[:-1]] == [None] * 5


@pytest.mark.parametrize(
    ("count", "first"), [(3, 0), pytest.param(250, 1000, marks=pytest.mark.rare)]
)
def test_random_schemas_are_kept_to(embedded, count, first):
    """By texts of a model that knows nothing of JSON; four different ones at a time."""
    guides, rng = kvjax.Guides(embedded), np.random.default_rng(first)
    for batch in range(count):
        schemas = [random_schema(rng) for _ in range(4)]
        found = kvjax.generate(
            embedded, ["The value: "] * 4, guide=[guides.json_schema(each) for each in schemas],
            max_new_tokens=480, max_len=512, temperature=0.5 + 0.5 * (batch % 2),
            seed=first + 4 * batch,
        )  # fmt: skip
        assert found.stats.finish_reasons == ("eos",) * 4, (schemas, found.text)
        for schema, text in zip(schemas, found.text, strict=True):
            jsonschema.validate(json.loads(text), schema)


def sentence_pieces(kind: str) -> Tokenizer:
    """Words that begin with ▁, letters, bytes, and special tokens that are pieces themselves."""
    letters = [chr(x) for x in range(0x21, 0x7F)]
    words = ["<unk>", "<s>", "</s>", "▁", "▁a", "▁if", "co", "endoftext"]
    words += letters + [f"<0x{x:02X}>" for x in range(256)]
    if kind == "BPE":
        model: Any = tokenizers.models.BPE(
            {word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>",
        )  # fmt: skip
    else:
        scores = [(word, 0.0 if i < 3 else -len(word)) for i, word in enumerate(words)]
        model = tokenizers.models.Unigram(scores, 0, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    steps = tokenizers.decoders
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace("▁", "first", kind == "Unigram")
    backend.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|endoftext|>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


SPECIAL = ["</s>", "a<s>b", "<|endoftext|>", "x</s>", "é<unk>", " <s></s> "]


@pytest.mark.slow(but=("Unigram", "BPE"))
@pytest.mark.parametrize("kind", ["bytes", "BPE", "Unigram"])
def test_the_names_of_special_tokens_are_spelled(embedded, kind):
    """They are text, which a special token has not; and one that ends a text is not among them."""
    lm = embedded
    if kind != "bytes":
        eos = replace(lm.generation, eos_token_ids=(2,))
        lm = replace(lm, tokenizer=sentence_pieces(kind), generation=eos)
    made, rows = kvjax.Guides(lm), []
    for text in SPECIAL:
        schema = {"type": "object", "properties": {"t": {"const": text}}, "required": ["t"],
                  "additionalProperties": False}  # fmt: skip
        rows += [
            (made.choices([text]), text),
            (made.regex(re.escape(text).replace("/", "[/]")), text),
            (made.json_schema(schema), json.dumps({"t": text}, separators=(",", ":"))),
        ]
    for prompt in ([5], [1]):
        found = kvjax.generate(
            lm, [prompt] * len(rows), guide=[guide for guide, _ in rows], max_new_tokens=40,
        )  # fmt: skip
        same = [json.loads(text) if text[0] == "{" else text for text in found.text]
        assert same == [json.loads(text) if text[0] == "{" else text for _, text in rows]
        assert set(found.stats.finish_reasons) == {"eos"}


def test_a_tokenizer_with_more_tokens_than_the_model(tiny_llama):
    """Padding, or tokens of images: their names are spelled as well."""
    backend = tokenizers.Tokenizer.from_str(tiny_llama.tokenizer.backend.to_str())
    backend.add_special_tokens(["<image>"])
    backend.add_tokens(["<call>"])
    lm = replace(tiny_llama, tokenizer=Tokenizer(backend))
    assert backend.get_vocab_size() == lm.config.vocab_size + 2
    texts = ["a<image>b", "<call>"]
    guides = [*map(kvjax.Guides(lm).choices, zip(texts))]
    assert kvjax.generate(lm, [[5]] * 2, guide=guides, max_new_tokens=12).text == texts


@pytest.mark.parametrize(
    "text", ["del\x7f", "\x00\x85", "\u2028\u2029", 'a\\b"c\n/', "\ufeff\U0010ffff"]
)
def test_choices_of_any_characters(embedded, text):
    guide = kvjax.Guides(embedded).choices([text])
    assert kvjax.generate(embedded, "a", guide=guide, max_new_tokens=24).text == [text]


def test_alternatives_of_one_of(embedded):
    """Discriminated unions, as pydantic writes them; those that may overlap are refused."""
    made = kvjax.Guides(embedded)
    kinds = {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind, "default": kind}, key: {"type": "boolean"}},
            "required": ["kind", key],
            "additionalProperties": False,
        }
        for kind, key in (("cat", "purrs"), ("dog", "barks"))
    }
    schema = {
        "$defs": kinds,
        "discriminator": {"propertyName": "kind"},
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds],
    }
    texts = kvjax.generate(
        embedded, ["a"] * 4, guide=made.json_schema(schema), max_new_tokens=48, temperature=1.0
    ).text
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    with pytest.raises(ValueError, match="alternatives of oneOf may overlap; use anyOf, or"):
        made.json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]})
    for way, given in (
        ("choices", ["\ud83d"]), ("regex", "\ud83d"), ("grammar", 'start: "\ud83d"'),
        ("json_schema", {"const": "\ud83d"}), ("json_schema", '{"const":"\ud83d"}'),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"is not valid Unicode: .* is a lone surrogate, U\+D83D"
        ):
            getattr(made, way)(given)
    with pytest.raises(ValueError, match="choices must be a list of strings, got one string: 'ab'"):
        made.choices("ab")


@pytest.mark.slow
def test_a_leading_space_is_text_behind_nothing_that_shows():
    """A guide is kept to by every character: by generate, beams and an engine."""
    lm = small(num_hidden_layers=1, windows=(None,), vocab_size=360)
    lm = replace(
        lm, tokenizer=sentence_pieces("BPE"),
        generation=replace(lm.generation, eos_token_ids=(2,)),
    )  # fmt: skip
    pattern = " [a-z]{3} [a-z]{2}"
    settings: dict[str, Any] = {"guide": kvjax.Guides(lm).regex(pattern), "max_new_tokens": 12}
    found = kvjax.generate(lm, [[1], [4]], n=2, temperature=1.0, **settings).text
    found += kvjax.generate(lm, [[1]], num_beams=2, **settings).text
    engine = engine_of(lm)
    handle = engine.submit([1], **settings)
    while engine.step():
        pass
    found.append(handle.text)
    assert all(re.fullmatch(pattern, text) for text in found), found


def test_one_guide_for_all_rows_and_again(tiny_llama):
    """Each goes along a copy, so it can be given again; one that has come further goes on there."""
    guide = kvjax.Guides(tiny_llama).regex("[a-z]{4}")
    settings: dict[str, Any] = {**LONG, "guide": guide, "prefill_chunk": 16}
    first = kvjax.generate(tiny_llama, list("ab"), n=3, **settings)
    assert all(re.fullmatch("[a-z]{4}", text) for text in first.text) and len(first.text) == 6
    assert len(set(first.text)) > 1
    again = kvjax.generate_batches(tiny_llama, [list("ab"), list("ab")], n=3, **settings)
    assert [each.text for each in again] == [first.text] * 2
    for token in tiny_llama.tokenizer.encode("xyz"):
        guide.accept(token)
    (text,) = kvjax.generate(tiny_llama, "a", **settings).text
    assert re.fullmatch("[a-z]", text)


def test_a_guide_that_cannot_go_on_ends_its_text(tiny_llama):
    lost = kvjax.Guides(tiny_llama).choices(["ab"])
    lost.accept(tiny_llama.tokenizer.encode("x")[0])
    settings: dict[str, Any] = {**LONG, "prefill_chunk": 16}
    found = kvjax.generate(tiny_llama, list("abcdef"), guide=[lost] + [None] * 5, **settings)
    assert found.text[0] == "" and found.stats.finish_reasons[0] == "eos"
    assert found.guides[0].error and found.guides[1:] == (None,) * 5
    engine = engine_of(tiny_llama)
    handle = engine.submit("a", guide=lost, max_new_tokens=9)
    while engine.step():
        pass
    assert (handle.text, handle.finish_reason) == ("", "eos") and lost.error


@pytest.mark.slow
def test_beams_keep_to_a_schema(embedded):
    """All that ended are of it; those that can't go on end there, and say why."""
    made = kvjax.Guides(embedded)
    schema = {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 2}
    lost = made.choices(["ab"])
    lost.accept(embedded.tokenizer.encode("x")[0])
    found = kvjax.generate(
        embedded, ["The value: ", "a"], guide=[made.json_schema(schema), lost], num_beams=3, n=3,
        max_new_tokens=16, max_len=64, prefill_chunk=16,
    )  # fmt: skip
    assert found.stats.finish_reasons[:3] == ("eos",) * 3
    for text in found.text[:3]:
        jsonschema.validate(json.loads(text), schema)
    assert len({tuple(ids) for ids in found.tokens[:3]}) == 3
    assert [guide.error for guide in found.guides[:3]] == [None] * 3
    assert found.text[3:] == [""] * 3 and found.guides[3].error


class Mute(Anything):
    def allowed(self):
        return np.zeros(2, np.uint32)


class Failing(Anything):
    def accept(self, token):
        raise RuntimeError("a user's")


def test_wrong_guides_are_refused_before_anything_runs(tiny_llama):
    lm, guide = shallow(), kvjax.Guides(tiny_llama).regex("a")
    for prompts, given, message in (
        ([[1]], {"guide": [Anything(), None]}, "2 guides for 1 prompts"),
        ([[1]], {"guide": []}, "0 guides for 1 prompts"),
        ([[1]], {"guide": "a"}, r"a guide needs a method allowed\(\), but 'a' has none"),
        (
            [[1], [2]],
            {"guide": [None, object()]},
            r"a guide needs a method allowed\(\), but <object",
        ),
        ([[1]], {"guide": Anything(), "min_new_tokens": 1}, "min_new_tokens is 1, but a guide may"),
        ([[1]], {"guide": Anything(99)}, r"a guide must return uint32\[2\], got uint32\[4\]"),
        ([[1]], {"guide": Mute()}, "a guide allows no token: at its end"),
        ([[1]], {"guide": guide}, "ends its text with token 257, which must be in eos_token_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.stream(lm, prompts, **given)
    assert kvjax.stream(lm, [[1]], guide=[None], min_new_tokens=1) is not None
    with pytest.raises(ValueError, match="a guide ends its text with token 257"):
        kvjax.generate(tiny_llama, ["a"], guide=guide, eos_token_ids=[3])
    for beams in (1, 2):
        with pytest.raises(RuntimeError, match="a user's"):
            kvjax.generate(lm, [[1]], guide=Failing(), max_new_tokens=3, num_beams=beams)
    with pytest.raises(ValueError, match="tokenizer"):
        kvjax.Guides(replace(tiny_llama, tokenizer=None))
    assert mask_words(tiny_llama.config) == guide.allowed().size
