"""Models of other libraries: examples, adapters, and the errors of ``kvjax.language_model``."""

import dataclasses
import functools
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from jax.sharding import PartitionSpec

import kvjax
from kvjax.layouts import Ring
from tests.matrix import some

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {
    path.stem: path
    for path in sorted((ROOT / "docs" / "examples").glob("*.py"))
    if path.stem.endswith(("_model", "_scan"))
}
"""The models; scripts of meshes and refs are tested in ``test_own_mesh.py``."""
TOKENS = np.random.default_rng(0).integers(1, 97, (2, 40)).astype(np.int32)
POLICIES = {
    "raw": kvjax.CachePolicy(),
    "int4": kvjax.policy(bits=4, block=8),
    "ring and sinks": kvjax.CachePolicy(Ring(16, sinks=4, slack=15)),
    "host": kvjax.CachePolicy(placement=kvjax.Host(), block=8),
}


def run(source: str, name: str) -> types.ModuleType:
    """A script as a module."""
    module = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
    return module


@functools.cache
def example(name: str) -> Any:
    return run(EXAMPLES[name].read_text(encoding="utf-8"), name)


@functools.cache
def model(name: str) -> kvjax.LanguageModel:
    return example(name).language_model()


def without_cache(source: str) -> str:
    """An example as it was before it took a cache, by what its comments say."""
    kept = [line for line in source.splitlines() if not line.endswith("# cache")]
    return "\n".join(re.sub(r"^( *)# before: ", r"\1", line) for line in kept)


BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "nnx_model": lambda module, tokens: module.make()(tokens),
    "equinox_model": lambda module, tokens: module.make()(tokens),
    "linen_scan": lambda module, tokens: module.Decoder().apply(model("linen_scan").params, tokens),
    "plain_scan": lambda module, tokens: module.apply(module.make(), tokens),
}


@pytest.mark.slow(but=("plain_scan",))
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_it_was_before_in_all_but_ten_lines(name):
    source = EXAMPLES[name].read_text(encoding="utf-8")
    changed = sum(line.endswith("# cache") for line in source.splitlines())
    assert 0 < changed <= 10 and len(source.splitlines()) < 120
    page = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    assert f"[{name}.py](examples/{name}.py) | " in page
    assert re.search(rf"\[{name}\.py\].*\| {changed} \|$", page, re.MULTILINE)
    was = BEFORE[name](run(without_cache(source), name), jnp.asarray(TOKENS))
    lm = model(name)
    np.testing.assert_allclose(lm.apply(lm.params, TOKENS), was, atol=1e-5)


def fed(lm: kvjax.LanguageModel, policy: Any, cuts: list[int]) -> np.ndarray:
    """Logits of a text in chunks; the second row is ragged."""
    step = jax.jit(lm.apply, donate_argnums=2)
    cache, found = kvjax.init_cache(lm.config, policy, batch=2, max_len=64), []
    for start, end in zip([0, *cuts], [*cuts, TOKENS.shape[1]], strict=True):
        part = TOKENS[:, start:end]
        logits, cache = step(lm.params, part, cache, lengths=np.array([end - start] * 2))
        found.append(logits)
    kvjax.check(cache)
    return np.concatenate(found, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("policy", some(POLICIES, "host"))
@pytest.mark.parametrize("name", some(EXAMPLES, "linen_scan"))
def test_an_example_with_a_cache_is_the_same_however_the_text_is_cut(name, policy):
    lm = model(name)
    stacked = name.endswith("scan")
    cache = kvjax.init_cache(lm.config, POLICIES[policy], batch=2, max_len=64)
    assert (cache.stacks is not None) == stacked
    found = fed(lm, POLICIES[policy], [7, 8, 21, 35])
    np.testing.assert_allclose(fed(lm, POLICIES[policy], [1, 16, 30]), found, atol=2e-5)
    true = np.asarray(lm.apply(lm.params, TOKENS))
    same = {"raw": 40, "host": 40, "ring and sinks": 16, "int4": 16}[policy]
    np.testing.assert_allclose(found[:, :same], true[:, :same], atol=2e-5)
    assert (np.abs(found[:, same:] - true[:, same:]).max(initial=0) > 1e-3) == (same < 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(EXAMPLES, "linen_scan"))
def test_an_example_generates_streams_and_is_evaluated(name):
    lm, prompts = model(name), [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]
    wanted = kvjax.generate(lm, prompts, max_new_tokens=6, use_cache=False)
    found = kvjax.generate(lm, prompts, max_new_tokens=6, cache="static")
    assert found.tokens == wanted.tokens and found.text is None
    pieces = list(kvjax.stream(lm, prompts, max_new_tokens=6, cache="static"))
    rows = [[token for piece in pieces for token in piece.tokens[row]] for row in range(2)]
    assert rows == found.tokens
    policies = {"int4": POLICIES["int4"]}
    quality = kvjax.evaluate(lm, TOKENS[0].tolist(), policies, context=40)["int4"]
    known = jax.nn.log_softmax(lm.apply(lm.params, TOKENS[:1])[0, :-1])
    nats = -np.take_along_axis(np.asarray(known), TOKENS[0, 1:, None], axis=1).mean()
    full = quality.overall.perplexity / quality.overall.perplexity_ratio
    assert np.isclose(np.log(full), nats, rtol=1e-4) and quality.overall.perplexity_ratio != 1


@pytest.mark.rare
def test_a_long_call_is_fed_in_parts_that_a_ring_has_slack_for():
    lm = model("plain_scan")
    cache = kvjax.init_cache(lm.config, POLICIES["ring and sinks"], batch=2, max_len=64)
    logits, cache = lm.apply(lm.params, TOKENS, cache)
    wanted = fed(lm, POLICIES["ring and sinks"], [15, 30])
    np.testing.assert_allclose(logits, wanted, atol=2e-5)
    last, _ = lm.apply(lm.params, TOKENS, kvjax.reset(cache), last_only=True)
    np.testing.assert_allclose(last[:, 0], wanted[:, -1], atol=2e-5)


@pytest.mark.slow
def test_programs_are_compiled_once_for_a_function():
    module = example("nnx_model")
    first, second = module.language_model(0), module.language_model(1)
    assert first.architecture == second.architecture
    kvjax.generate(first, [[1, 2]], max_new_tokens=4)
    assert kvjax.generate(second, [[3, 4]], max_new_tokens=4).stats.compilations == 0
    wider = first.put(jax.tree.map(lambda x: x.astype(jnp.float16), first.params))
    assert jax.tree.leaves(wider)[0].dtype == jnp.float32


@pytest.mark.rare
def test_plan_bench_and_compile_take_it():
    lm = model("plain_scan")
    config = types.SimpleNamespace(**vars(lm.config)["_config"].__dict__)
    config.num_attention_heads, config.hidden_size = 4, 64
    lm = kvjax.language_model(example("plain_scan").apply, config, lm.params)
    found = kvjax.plan(lm, "static", batch=2, max_len=64)
    assert found.source.startswith("compiled for cpu")
    assert found.weights == sum(x.nbytes for x in jax.tree.leaves(lm.params))
    assert found.cache == kvjax.nbytes(kvjax.init_cache(lm.config, batch=2, max_len=64))
    ready = kvjax.compile(lm, "static", batch=2, max_len=32)
    assert ready.programs > 2
    stats = kvjax.generate(lm, [[1], [2]], max_new_tokens=3, max_len=32, cache="static").stats
    assert stats.compilations == 0
    (cell,) = kvjax.bench.measure(lm, {"raw": "static"}, prompts=[8], steps=2, repeats=1).cells
    assert cell.ms > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", some(EXAMPLES, "plain_scan"))
def test_on_a_mesh(name):
    lm = model(name)
    specs = None
    if name == "plain_scan":
        specs = {"embed": PartitionSpec(), "layers": PartitionSpec()}
        specs = {**specs, "layers": {key: PartitionSpec() for key in lm.params["layers"]}}
        specs["layers"]["up"] = PartitionSpec(None, None, "tensor")
        architecture = dataclasses.replace(lm.architecture, specs=specs)
        lm = dataclasses.replace(lm, architecture=architecture)
    mesh = kvjax.make_mesh(data=2, tensor=2)
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]
    found = kvjax.generate(lm, prompts, max_new_tokens=4, cache="static", mesh=mesh)
    assert found.tokens == kvjax.generate(lm, prompts, max_new_tokens=4, cache="static").tokens
    if specs is not None:
        assert lm.on(mesh).params["layers"]["up"].sharding.spec == specs["layers"]["up"]
        wrong = dataclasses.replace(lm.architecture, specs={"embed": PartitionSpec()})
        with pytest.raises(ValueError, match="the tree of specs does not match"):
            wrong.param_shardings(mesh)


def test_configs_of_transformers_and_without_a_dtype():
    """An object with the name that Transformers has for its decoder's part."""
    lm = model("plain_scan")

    class Config(types.SimpleNamespace):
        def get_text_config(self, decoder=False):
            return self

    config = Config(**example("plain_scan").CONFIG, eos_token_id=[3, 5])
    own = kvjax.language_model(example("plain_scan").apply, config, lm.params)
    assert own.config.dtype == "float32" and own.generation.eos_token_ids == (3, 5)
    given = {"max_new_tokens": 4, "eos_token_ids": ()}
    found = kvjax.generate(own, [[1, 2]], **given).tokens
    assert found == kvjax.generate(lm, [[1, 2]], **given).tokens
    mixed = {"a": jnp.ones(3), "b": jnp.ones((9, 9), jnp.bfloat16)}
    assert kvjax.language_model(whole, changed(), mixed).config.dtype == "bfloat16"


class Letters:
    """A tokenizer of one's own."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 31 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i + 31) for i in ids)


def test_tokenizers_of_other_libraries():
    lm = model("plain_scan")
    words = {f"w{i}": i for i in range(97)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    for tokenizer, text, ids in ((Letters(), "abc", [66, 67, 68]), (backend, "w5 w7", [5, 7])):
        own = kvjax.language_model(lm.architecture.function, vars(lm.config)["_config"], lm.params,
                                   tokenizer)  # fmt: skip
        assert own.encode(text)[0].tolist() == [ids]
        found = kvjax.generate(own, text, max_new_tokens=5)
        assert found.tokens == kvjax.generate(lm, [ids], max_new_tokens=5).tokens
        assert found.text[0].strip() == own.decode(found.tokens[0])


def changed(**config: Any) -> Any:
    """The plain example with another config."""
    found = {**example("plain_scan").CONFIG, **config}
    return {name: value for name, value in found.items() if value is not None}


def calls(function: Callable[..., Any]) -> Callable[[], Any]:
    """Generation by a function that goes wrong."""

    def wrong() -> None:
        params = example("plain_scan").make()
        lm = kvjax.language_model(function, changed(), params)
        kvjax.generate(lm, [[1, 2]], max_new_tokens=2)

    return wrong


def whole(params: Any, tokens: Any, cache: Any, lengths: Any) -> Any:
    return example("plain_scan").apply(params, tokens, cache, lengths)


def begins(params: Any, tokens: Any, cache: Any, lengths: Any) -> Any:
    return kvjax.step(cache, tokens, lengths=lengths)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "other parameters": (
        lambda: kvjax.language_model(lambda tokens, cache: None, changed(), {"a": np.ones(1)}),
        r"must be a hashable function of \(params, tokens, cache, lengths\)",
    ),
    "no hash": (
        lambda: kvjax.language_model(
            type("Odd", (), {"__hash__": None, "__call__": whole})(), changed(), {"a": np.ones(1)}
        ),
        "must be a hashable function",
    ),
    "no vocabulary": (
        lambda: kvjax.language_model(whole, changed(vocab_size=None), {"a": np.ones(1)}),
        "has no vocab_size",
    ),
    "no layers": (
        lambda: kvjax.language_model(whole, changed(num_hidden_layers=None), {"a": np.ones(1)}),
        "has no num_hidden_layers",
    ),
    "no heads": (
        lambda: kvjax.language_model(whole, changed(num_key_value_heads=None), {"a": np.ones(1)}),
        "neither num_key_value_heads nor num_attention_heads",
    ),
    "no arrays": (lambda: kvjax.language_model(whole, changed(), {"a": "b"}), "a pytree of arrays"),
    "an end that is no token": (
        lambda: kvjax.language_model(whole, changed(), {"a": np.ones(1)}, eos_token_ids=97),
        "token id 97 is out of range: the vocabulary has 97",
    ),
    "a tokenizer that can't decode": (
        lambda: kvjax.language_model(whole, changed(), {"a": np.ones(1)}, "letters"),
        "the tokenizer, a str, has no decode",
    ),
    "no cache back": (
        calls(lambda p, t, c, n: whole(p, t, c, n)[0]), r"must return \(logits, cache\)"
    ),
    "logits of another shape": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0][..., :5], c)), "of <lambda> must be"
    ),
    "a call in place of the cache": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], begins(p, t, c, n))), "return call.done"
    ),
    "a forgotten done": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], begins(p, t, c, n).cache)),
        "a cache within a call",
    ),
    "the cache as it was given": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], c)), "without the call's tokens"
    ),
    "no cache at all": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], "c")), "its cache is a str"
    ),
    "a layer that is left out": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], begins(p, t, c, n).done())),
        "layer",
    ),
    "another cache": (
        calls(lambda p, t, c, n: (whole(p, t, c, n)[0], kvjax.init_cache(
            types.SimpleNamespace(**changed(dtype="float32")), "dynamic", batch=1))),
        "another cache than",
    ),
    "parameters of another model": (
        lambda: model("plain_scan").with_params(model("linen_scan").params), "the parameters"
    ),
    "parameters of other shapes": (
        lambda: model("plain_scan").with_params(
            {**model("plain_scan").params, "embed": jnp.ones((97, 32))}
        ),
        r"embed has shape \[97, 32\], but the model.s is \[97, 64\]",
    ),
    "parameters of another dtype": (
        lambda: model("plain_scan").with_params(
            {**model("plain_scan").params, "embed": jnp.ones((97, 64), jnp.bfloat16)}
        ),
        "lm.put",
    ),
    "a plan without heads": (
        lambda: kvjax.plan(model("plain_scan"), max_len=8), "no num_attention_heads, which plans"
    ),
    "a tree of prefixes": (
        lambda: kvjax.PrefixTree(model("plain_scan"), max_len=64), "config has stacked=True"
    ),
    "a checkpoint": (lambda: model("plain_scan").save("nowhere"), "only models of kvjax.models"),
    "a text beyond the positions": (
        lambda: kvjax.score(model("nnx_model"), [[1] * 250], [[1] * 10]),
        "250 tokens of prompt and a continuation of 10 need 259 positions",
    ),
    "a chat": (
        lambda: dataclasses.replace(model("plain_scan"), tokenizer=Letters()).chat([]),
        "no chat template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_in_a_sentence(name):
    wrong, words = WRONG[name]
    with pytest.raises(ValueError, match=words) as told:
        wrong()
    assert len(str(told.value)) < 300
