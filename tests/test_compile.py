"""What is compiled ahead is what generation runs: no more programs come after it."""

from typing import Any

import jax
import pytest

import kvjax
from kvjax import models
from kvjax.generation import programs
from kvjax.generation.generator import generate, stream
from kvjax.layouts import Growing
from tests.checkpoints import write_llama
from tests.matrix import some
from tests.test_guided import Anything

POLICIES: dict[str, tuple[Any, int]] = {
    "static": (kvjax.policy("static"), 90),
    "quantized": (kvjax.policy("quantized", group_size=16, block=16), 90),
    "dynamic": (kvjax.CachePolicy(Growing(start=16)), 150),
    "sliding_window": (kvjax.policy("sliding_window", window=20, sinks=2), 90),
    "offloaded_static": (kvjax.policy("offloaded_static", block=16), 90),
}
SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_k": 5, "repetition_penalty": 1.1, "logit_bias": {7: 1.0},
    "logprobs": 1, "presence_penalty": 0.5, "no_repeat_ngram_size": 2, "typical_p": 0.9,
}  # fmt: skip


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """A model of one layer, for each is one more to compile in every program."""
    return models.load(
        str(write_llama(tmp_path_factory.mktemp("one") / "llama", num_hidden_layers=1))
    )


def prompt(length):
    return [(7 * i) % 250 for i in range(length)]


RARE = ("sliding_window", "offloaded_static", "quantized", "dynamic")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.rare] * (x in RARE)) for x in POLICIES]
)
def test_generation_compiles_nothing_afterwards(lm, name):
    """Neither any length of prompts nor any number of new tokens."""
    jax.clear_caches()
    policy, max_len = POLICIES[name]
    settings: dict[str, Any] = {"max_len": max_len, "prefill_chunk": 32, "eos_token_ids": ()}
    made = kvjax.compile(lm, policy, batch=2, **settings)
    assert made.compilations >= made.programs and made.seconds > 0
    assert made.temporaries is None or made.temporaries > 0
    assert len(made.executables) == made.programs - 1  # all but the first token's
    assert all(name.startswith(("prefill", "decode")) for name in made.executables)
    for length in (1, 15, 16, 17, 32, 33, 50, 64, 65, max_len):
        prompts = [prompt(length), prompt(1 + length // 3)]
        for count in {1, min(3, max_len - length + 1), max_len - length + 1}:
            settings |= {"max_new_tokens": count, "cache": policy}
            result = generate(lm, prompts, seed=length, **settings)
            assert result.stats.compilations == 0, (length, count)
            assert [len(tokens) for tokens in result.tokens] == [count, count]
    again = kvjax.compile(lm, policy, batch=2, max_len=max_len, prefill_chunk=32, eos_token_ids=())
    assert (again.compilations, again.programs) == (0, made.programs)


GUIDED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "plain": ({}, {"feed", "choose"}),
    "lookup": (
        {"draft": kvjax.PromptLookup(3, min_ngram=1)},
        {"feed", "choose", "propose", "feed drafts", "check"},
    ),
    "model": (
        {"draft": "model", "temperature": 0.8, "repetition_penalty": 1.1},
        {"feed", "choose", "propose", "feed drafts", "check", "draft's prefill 16"},
    ),
    "beams": ({"num_beams": 3}, {"feed", "choose"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", some(GUIDED, "lookup"))
def test_guided_generation_compiles_nothing_afterwards(lm, way):
    jax.clear_caches()
    settings, names = GUIDED[way]
    settings = settings | {"max_len": 48, "prefill_chunk": 16, "eos_token_ids": (3,), "logprobs": 1}
    if settings.get("draft") == "model":
        settings["draft"] = kvjax.DraftModel(lm, 3)
    guide = Anything(lm.config.vocab_size)
    made = kvjax.compile(lm, batch=2, guide=guide, **settings)
    assert made.executables.keys() == names | {"prefill 16"} and guide.tokens == []
    repeated = [7, 8, 9] * 5
    for prompts in ([repeated, prompt(3)], [prompt(1), repeated]):
        found = generate(lm, prompts, guide=guide, max_new_tokens=12, **settings)
        assert found.stats.compilations == 0 and found.stats.new_tokens > 2
    assert (found.stats.speculation is None) == ("draft" not in settings)
    assert kvjax.compile(lm, batch=2, guide=guide, **settings).compilations == 0


@pytest.mark.slow
def test_the_programs_are_those_that_can_come(lm):
    """Widths of 16, 32 and 64, the first token, and the loop: a text of 50 tokens has no more."""
    assert kvjax.compile(lm, max_len=50).programs == 3 + 1 + 1
    assert kvjax.compile(lm, max_len=10).programs == 1 + 1 + 1
    assert kvjax.compile(lm, max_len=50, prefill_chunk=20).programs == 2 + 1 + 1
    growing = kvjax.CachePolicy(Growing(start=16))
    # Up to 16 tokens one width; up to 64 those of 32 and 64; up to 80 the rest of one that is cut.
    assert kvjax.compile(lm, growing, max_len=80, prefill_chunk=64).programs == (
        1 + (1 + 1) + (2 + 1) + (1 + 1)
    )


@pytest.mark.rare
def test_settings_choose_programs(lm):
    jax.clear_caches()
    settings: dict[str, Any] = {"max_len": 40, **SAMPLED}
    kvjax.compile(lm, min_new_tokens=3, **settings)
    for more in ({}, {"temperature": 0.1, "top_k": 50, "logit_bias": {9: 2.0}}):
        given: dict[str, Any] = settings | {"max_new_tokens": 9, "min_new_tokens": 2} | more
        assert generate(lm, [prompt(9)], **given).stats.compilations == 0
    for piece in stream(lm, [prompt(5)], max_new_tokens=12, min_new_tokens=1, **settings):
        assert piece.stats.compilations == 0
    assert generate(lm, [prompt(9)], max_len=40, max_new_tokens=9).stats.compilations > 0


@pytest.mark.slow
def test_a_stop_string_compiles_nothing(lm):
    jax.clear_caches()
    kvjax.compile(lm, max_len=64)
    whole = generate(lm, ["Once"], max_new_tokens=20, max_len=64)
    assert whole.stats.compilations == 0
    stop = whole.text[0][5:7]
    result = generate(lm, ["Once"], max_new_tokens=20, max_len=64, stop=stop)
    assert result.stats.finish_reasons == ("stop",) and result.stats.compilations == 0


def test_the_model_is_not_run(lm, monkeypatch):
    """Its programs are lowered and compiled, and never called."""
    called = []
    for name in ("prefill", "decode"):
        monkeypatch.setattr(programs, name, _Watched(getattr(programs, name), called))
    kvjax.compile(lm, max_len=20)
    assert called == []


class _Watched:
    def __init__(self, function, called):
        self.lower, self._called = function.lower, called

    def __call__(self, *arguments):
        self._called.append(arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"max_len": 0}, "max_len must be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"prefill_chunk": 0}, "prefill_chunk must be"),
        ({"policy": "turbo"}, "unknown cache policy 'turbo'"),
        ({"policy": None}, "cache is None"),
    ],
)
def test_wrong_arguments_are_refused(lm, changes, message):
    with pytest.raises(ValueError, match=message):
        kvjax.compile(lm, **{"max_len": 20, **changes})


def test_a_cache_is_no_policy(lm):
    cache = kvjax.init_cache(lm.config, max_len=20)
    with pytest.raises(ValueError, match="expected a policy, got a cache"):
        kvjax.compile(lm, cache, max_len=20)
    assert not cache.length.is_deleted()
