"""Unusual but legal requests: no raw error, and the same answer by every interface.

A few examples are drawn here; 2,000 are of the shards, in parts with seeds of their own.
"""

import importlib.util
import re
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.generation.options import GenerationOptions, parse_logprobs
from kvjax.memory import InferenceLimits
from tests import unusual
from tests.checkpoints import write_llama
from tests.test_guided import sentence_pieces

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(x) is None for x in ("llguidance", "starlette", "httpx")),
    reason="needs the extras guided and serve",
)
MODELS = "bytes", "embedded", "pieces"
PARTS, EXAMPLES = 20, 100


def small(folder: Path, name: str) -> Any:
    """A model of one layer, of a token a byte or of sentence pieces."""
    changes = {} if name == "bytes" else {"vocab_size": 362, "bos_token_id": 1, "eos_token_id": 2}
    write_llama(folder / "llama", num_hidden_layers=1, **changes)
    if name == "pieces":
        unusual.write_pieces(folder / "llama")
    return models.load(str(folder / "llama"), dtype="float32")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, embedded):
    """Each model behind every interface, made when it is first asked for."""
    made: dict[str, unusual.World] = {}

    def world(name: str) -> unusual.World:
        if name not in made:
            lm = embedded if name == "embedded" else small(tmp_path_factory.mktemp(name), name)
            made[name] = unusual.World(lm)
        return made[name]

    yield world
    for each in made.values():
        each.close()


def search(world: unusual.World, example: Any, examples: int, seed: int) -> None:
    """Draw examples with a seed, and judge each."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, suppress_health_check=list(hypothesis.HealthCheck), print_blob=True
    )
    @hypothesis.given(example)
    def judged(found: tuple[Any, ...]) -> None:
        judge, *given = found
        hypothesis.event(judge.__name__)
        judge(world, *given)

    judged()


def test_a_few_requests(worlds):
    search(worlds("bytes"), unusual.FEW, 8, 0)


@pytest.mark.rare
@pytest.mark.parametrize("part", range(PARTS))
def test_many_requests(worlds, part):
    search(worlds(MODELS[part % len(MODELS)]), unusual.EXAMPLES, EXAMPLES, part)


WRONG: dict[str, tuple[Any, str]] = {
    "stop": (5, "stop must be a string"),
    "eos_token_ids": (1.5, "eos_token_ids must be a token id, or a list of them, got 1.5"),
    "min_p": (np.array([1.0, 2.0]), "min_p must be from 0 to 1, got array"),
    "temperature": (jnp.array([1.0, 2.0]), "temperature must be a finite number, at least 0, got"),
    "seed": (jax.random.key(0), "seed must be an integer, or one per row, got Array"),
    "length_penalty": (np.array([1, 2]), "length_penalty is array"),
    "max_new_tokens": (10**30, "max_new_tokens must be at most 1,099,511,627,776, got 1000"),
    "max_len": (2**63, "max_len must be at most 1,099,511,627,776"),
    "n": (2**31, "n must be at most 65,536, got 2147483648"),
    "num_beams": (2**31, "num_beams must be at most 65,536, got 2147483648"),
    "best_of": (10**30, "best_of must be at most 65,536, got 1000"),
    "min_new_tokens": (
        -(10**5000),
        "min_new_tokens must be an integer >= 0, got a numb",
    ),
    "prefill_chunk": (2**31, "prefill_chunk must be at most 2,147,483,647"),
    "use_cache": ("no", "use_cache must be True or False, got 'no'"),
    "logprobs": (np.zeros((40, 40)), "logprobs must be an integer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_are_named_in_a_line(tiny_llama, name):
    value, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        kvjax.generate(tiny_llama, "ab", **{"max_new_tokens": 2, name: value})
    assert "\n" not in str(raised.value)


def test_wrong_prompts_are_named(tiny_llama):
    for prompts in ([[[1, 2], [3]]], [[None]], [{"a": 1}], [jax.random.key(0)]):
        with pytest.raises(ValueError, match="prompt 0 must be a string or a list of token ids"):
            kvjax.generate(tiny_llama, prompts, max_new_tokens=2)


def test_truth_and_seconds_of_other_libraries(tiny_llama):
    """Where only Python's were taken."""
    for yes in (True, np.True_, jnp.array(True)):
        options = GenerationOptions(use_cache=yes, padded=yes)
        assert (options.use_cache, options.padded) == (True, True) and type(options.padded) is bool
        assert parse_logprobs(tiny_llama.config, yes) == 0
    draft = kvjax.PromptLookup(adaptive=np.False_)
    assert draft.adaptive is False
    assert InferenceLimits(cache_memory_ratio=np.float32(0.5)).cache_memory_ratio == 0.5
    limits = InferenceLimits(max_batch_size=2, max_seq_len=64)
    engine = kvjax.Engine(tiny_llama, limits=limits, prefill_chunk=16, batch_invariant=np.True_)
    few: dict[str, Any] = {"max_new_tokens": 2}
    request = engine.check("ab", deadline=np.float32(9), priority=jnp.int32(-1), **few)
    assert (request.deadline, request.priority) == (9, -1)
    with pytest.raises(ValueError, match="seed must be an integer from 0"):
        engine.check("ab", seed=jnp.array([1.0, 2.0]), **few)
    with pytest.raises(ValueError, match=r"deadline must be .* got array"):
        engine.check("ab", deadline=np.array([1.0, 2.0]), **few)


def test_arguments_of_guides(tiny_llama):
    """Numbers of NumPy and JAX in schemas; what is no text, or no JSON, is a sentence."""
    guides = kvjax.Guides(tiny_llama)
    schema = {
        "type": "object", "properties": {"a": {"const": np.int64(7)}, "b": {"enum": np.arange(1)},
                                         "c": {"const": jnp.float32(0.5)}},
        "required": ["a", "b", "c"], "additionalProperties": np.False_,
    }  # fmt: skip
    found = kvjax.generate(tiny_llama, "a", guide=guides.json_schema(schema), max_new_tokens=32)
    assert found.text == ['{"a":7,"b":0,"c":0.5}']
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    round_trip: dict[str, Any] = {}
    round_trip["a"] = round_trip
    for way, given, message in (
        ("json_schema", {"const": {1, 2}}, "not valid JSON: {1, 2} can't be written as JSON"),
        ("json_schema", {"const": float("nan")}, "the schema is not valid JSON: "),
        ("json_schema", {(): 1}, "the schema is not valid JSON: keys must be str"),
        ("json_schema", deep, "the schema is not valid JSON: maximum recursion depth"),
        ("json_schema", round_trip, "the schema is not valid JSON: Circular reference"),
        ("regex", 5, "the regex must be a string, got 5"),
        ("grammar", b"start: x", "the grammar must be a string, got b'start: x'"),
        ("choices", 5, "choices must be a list of strings, got 5"),
        ("choices", np.array([1, 2]), "choices must be one or more strings, got array"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            getattr(guides, way)(given)
    found = kvjax.generate(tiny_llama, "a", guide=guides.choices(iter(["ab"])), max_new_tokens=8)
    assert found.text == ["ab"]


def test_text_behind_bytes_that_begin_inside_a_character(tmp_path):
    """Of a tokenizer of sentencepiece's kind: its decoder spoils a run of bytes that is cut."""
    tokenizer = sentence_pieces("BPE")
    for before in ("日本語", "a\U0008917d\U0005e2cf\U000fb96c"):
        stream = tokenizer.stream(tokenizer.encode(before))
        ids = tokenizer.encode("é", add_special_tokens=False)[-2:]
        assert [stream.push(token) for token in ids] == ["", "é"]
    lm = small(tmp_path, "pieces")
    # A byte of its own, where there is a letter too.
    byte = tokenizer.backend.token_to_id("<0x5B>")
    found = kvjax.generate(
        lm, "日本語", guide=kvjax.Guides(lm).choices(["[é", "]é"]), max_new_tokens=8,
        logit_bias={byte: 100},
    )  # fmt: skip
    assert byte in found.tokens[0] and found.text == ["[é"]


def test_texts_that_a_tokenizer_changes_are_spelled(tmp_path):
    """Where a token for them says something else: ▁ is a space."""
    lm = small(tmp_path, "pieces")
    texts = ["▁", "a▁ b", "▁\0 "]
    guides = [kvjax.Guides(lm).choices([text]) for text in texts]
    found = kvjax.generate(lm, ["a"] * 3, guide=guides, max_new_tokens=16)
    assert found.text == texts and [guide.error for guide in found.guides] == [None] * 3


def test_huge_sizes_are_refused_in_a_sentence(tiny_llama):
    """What no device counts names its limit; what no memory holds is a ``CacheMemoryError``."""
    config, static = tiny_llama.config, kvjax.policy("static")
    few = InferenceLimits(max_batch_size=1, max_seq_len=64)

    def cache(**sizes):
        return kvjax.init_cache(config, static, **{"batch": 1, "max_len": 64} | sizes)

    calls: list[tuple[str, Any]] = [
        ("max_len", lambda size: cache(max_len=size)),
        ("batch", lambda size: cache(batch=size)),
        ("to", lambda size: kvjax.grow(cache(), size)),
        ("max_seq_len", lambda size: InferenceLimits(max_seq_len=size)),
        ("max_batch_size", lambda size: InferenceLimits(max_batch_size=size)),
        ("pages", lambda size: kvjax.Engine(tiny_llama, limits=few, pages=size)),
        ("prefill_chunk", lambda size: kvjax.Engine(tiny_llama, limits=few, prefill_chunk=size)),
        ("max_len", lambda size: kvjax.Chat(tiny_llama, max_len=size)),
        ("max_len", lambda size: kvjax.plan(tiny_llama, max_len=size)),
    ]
    for name, call in calls:
        for size in (2**41, 2**63, 10**30):
            with pytest.raises(ValueError, match=f"{name} must be at most [0-9,]+, got"):
                call(size)
    long = InferenceLimits(max_batch_size=1, max_seq_len=2**30)
    with pytest.raises(kvjax.CacheMemoryError, match="cache does not fit in memory: 1 row"):
        kvjax.Engine(tiny_llama, limits=long)
    with pytest.raises(
        kvjax.CacheMemoryError,
        match="page pool does not fit into the device's memory; use fewer pages",
    ):
        kvjax.PrefixTree(tiny_llama, pages=2**24, max_len=64)
    with pytest.raises(
        kvjax.CacheMemoryError, match="not enough memory to grow the cache to 1,073,741,82"
    ):
        kvjax.grow(cache(), 2**30)


def test_what_is_no_list_is_named(tiny_llama):
    deep: Any = {}
    for _ in range(100_000):
        deep = [deep]
    lm, message = tiny_llama, {"role": "user", "content": "a"}
    for call, words in (
        (
            lambda: lm.encode(5),
            "texts must be a string, a list of strings, or a list of lists of token ids",
        ),
        (lambda: lm.encode([1.5]), "expected one row of token ids, got float: 1.5"),
        (lambda: lm.decode(5), "expected one row of token ids, got int: 5"),
        (lambda: lm.decode(jax.random.key(0)), "expected one row of token ids, got"),
        (lambda: lm.chat(5), "messages must be a list of at least one message, each a dict, got 5"),
        (lambda: lm.chat([message], tools=deep), "messages and variables must be plain data: max"),
        (lambda: kvjax.score(lm, "a", 5), "continuations must be a list with an entry for each"),
        (lambda: kvjax.score(lm, "a", [5]), "the continuations of prompt 0 must be a list, got 5"),
        (lambda: kvjax.generate_batches(lm, 5), "batches must be an iterable of batches, got 5"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
    assert lm.decode([-1, 10**12, *lm.encode("a")[0][0].tolist()]) == "a"
