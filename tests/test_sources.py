"""Models with an encoder: what it read is a cache of its own, which the decoder goes by."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.bench.measuring import measure
from kvjax.generation.model import GenerationDefaults
from kvjax.layouts import Ring
from kvjax.memory.limits import InferenceLimits
from kvjax.models import Architecture, LanguageModel, T5Config
from tests.copies import assert_no_copy, copies
from tests.matrix import some

CONFIG = T5Config(
    model_type="t5", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_encoder_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    layer_norm_epsilon=1e-6, activation="relu", is_gated_act=False, tie_word_embeddings=True,
    scale_decoder_outputs=False, relative_attention_num_buckets=32,
    relative_attention_max_distance=128,
)  # fmt: skip
TEXTS = [np.random.default_rng(n).integers(2, 61, size).tolist() for n, size in enumerate((150, 9))]
NEW = 9


@functools.cache
def t5(config: T5Config = CONFIG) -> LanguageModel:
    model = Architecture(config)
    params = jax.tree.map(lambda x: x if x.ndim == 1 else 8 * x, model.init_params(0))
    return LanguageModel(config, params, None, GenerationDefaults(), model, "a test")


def written(lm: Any, prompts: Any = TEXTS, **settings: Any) -> Any:
    return kvjax.generate(lm, prompts, **{"max_new_tokens": NEW, **settings})


def of_decoder(lm: Any, tokens: Any, **settings: Any) -> Any:
    return jax.jit(lm.apply)(lm.params, jnp.asarray(tokens), **settings)


TARGET = np.random.default_rng(9).integers(0, 61, (2, 7))


POLICIES: dict[str, tuple[Any, float]] = {
    "offloaded": ("offloaded_static", 1e-6),
    "a ring of the decoder": (kvjax.CachePolicy(Ring(64)), 1e-6),
    "paged": ("paged", 1e-6),
    "8 bits": (kvjax.policy("quantized", bits=8), 0.1),
    "4 bits on the host": (kvjax.policy("offloaded_static", bits=4), 1.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some(POLICIES, "a ring of the decoder"))
def test_the_policy_of_a_source(name: str) -> None:
    """Codecs and places serve it; whatever the layout was, all of it is seen."""
    lm, (policy, tolerance) = t5(), POLICIES[name]
    raw = of_decoder(lm.with_encoder_inputs(TEXTS), TARGET)
    read = lm.with_encoder_inputs(TEXTS, policy)
    assert read.params["source"].length.tolist() == [150, 9]
    found = of_decoder(read, TARGET)
    assert np.max(np.abs(found - raw)) <= tolerance
    if tolerance > 1e-6:
        assert np.any(found != raw)
    assert written(lm, cache=policy).tokens == written(read, [[0]] * 2, cache=policy).tokens


@pytest.mark.slow
def test_a_cache_does_not_change_what_is_written() -> None:
    lm = t5()
    wanted = written(lm)
    assert wanted.tokens == written(lm, use_cache=False).tokens
    assert wanted.tokens == [written(lm, [text]).tokens[0] for text in TEXTS]
    pieces = [piece.tokens for piece in kvjax.stream(lm, TEXTS, max_new_tokens=NEW)]
    for row in range(2):
        assert [token for piece in pieces for token in piece[row]] == wanted.tokens[row]
    read = lm.with_encoder_inputs(TEXTS)
    more = written(read, wanted.pending_tokens, cache=wanted.cache)
    assert more.tokens == [row[NEW:] for row in written(lm, max_new_tokens=2 * NEW).tokens]


@pytest.mark.rare
def test_samples_share_a_source() -> None:
    lm, seeds = t5(), list(range(6))
    found = written(lm, n=3, temperature=1.0, seed=seeds)
    for row, seed in enumerate(seeds):
        alone = written(lm, [TEXTS[row // 3]], temperature=1.0, seed=seed)
        assert found.tokens[row] == alone.tokens[0]
    assert found.cache is not None and found.cache.batch == 6


@pytest.mark.slow
def test_scores_and_rollouts_go_by_what_was_read() -> None:
    lm = t5().with_encoder_inputs(TEXTS)
    wanted = written(lm, [[0]] * 2, logprobs=True, eos_token_ids=())
    told = np.array([[each.logprob for each in row] for row in wanted.logprobs])
    scored = kvjax.score(lm, [[0]] * 2, wanted.tokens)
    assert np.allclose(scored.logprobs[:, :NEW], told, atol=1e-5)
    rolled = kvjax.rollout(lm, lm.params, [[0]] * 2, n=2, max_new_tokens=NEW, temperature=1.0)
    whole = jnp.asarray(np.asarray(rolled.tokens))
    logits = jax.nn.log_softmax(of_decoder(lm, whole))
    for row in range(4):
        length = int(rolled.lengths[row])
        drawn = [logits[row, n - 1, whole[row, n]] for n in range(1, length)]
        assert np.allclose(rolled.logprobs[row, : length - 1], drawn, atol=1e-5)


@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        {"tensor": 2, "sequence": 2},
    ],
    ids=lambda sizes: "-".join(sizes),
)
@pytest.mark.rare
def test_on_a_mesh(sizes: dict[str, int]) -> None:
    """Rows that ``data`` does not divide are filled up, of the source as well."""
    lm, texts = t5(), [*TEXTS, TEXTS[1][:4]]
    wanted = written(lm, texts, n=2, temperature=1.0)
    over = kvjax.make_mesh(**sizes)
    roomy = InferenceLimits(cache_memory_ratio=1.0, device_memory=2**30)
    found = written(lm, texts, n=2, temperature=1.0, mesh=over, limits=roomy)
    assert found.tokens == wanted.tokens


def test_a_long_text_is_read_in_pieces() -> None:
    lm = t5()
    text = np.random.default_rng(5).integers(2, 61, 1200).tolist()
    tokens, lengths = lm.encode([text])
    empty = kvjax.init_cache(CONFIG, max_len=1200)
    whole = jax.jit(lm.architecture.read)(lm.params, tokens, lengths, empty)
    padded = lm.with_encoder_inputs([text]).params["source"]  # 1,536 places, three pieces
    found, wanted = (kvjax.read(x, 0)[0][:, :, :1200] for x in (padded, whole))
    assert np.allclose(found, wanted, atol=1e-5)


def test_a_step_copies_no_source() -> None:
    """The cache is written in place, and nothing of half a layer's keys is made of either."""
    config = replace(CONFIG, head_dim=64)
    model = Architecture(config)
    shapes = model.abstract_params()
    room = 4096
    cache, source = (
        jax.eval_shape(lambda: kvjax.init_cache(config, batch=2, max_len=room)) for _ in range(2)
    )
    layer = 2 * 4 * room * 64 * 4
    step = jax.jit(model.apply, donate_argnames="cache")
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    compiled = step.lower(shapes | {"source": source}, tokens, cache).compile()
    assert_no_copy(compiled, kvjax.nbytes(cache)["device"], layer)
    assert copies(compiled, layer // 2) == []
    assert compiled.memory_analysis().temp_size_in_bytes < layer // 2


@pytest.mark.rare
def test_what_compiles() -> None:
    """A text of a length that was met, nothing; nor what was compiled before."""
    lm = t5()
    written(lm)
    other = [[5, 9, 30] * 60, [7, 8]]
    assert written(lm, other).stats.compilations == 0
    read = lm.with_encoder_inputs(other)
    assert kvjax.compile(read, max_len=128, batch=2).programs
    assert written(read, [[0]] * 2, max_len=128).stats.compilations == 0


@pytest.mark.slow
def test_figures_are_of_both_caches() -> None:
    lm = t5()
    stats = written(lm).stats
    assert (stats.prompt_tokens, stats.new_tokens) == (159, 2 * NEW)
    slots = 192 + 64  # of the source, and of what is written
    assert stats.cache_bytes == {"device": 2 * 2 * 2 * slots * 32 * 4}


@pytest.mark.slow
def test_batches_read_each_their_own() -> None:
    lm = t5()
    found = kvjax.generate_batches(lm, [TEXTS, TEXTS[::-1]], max_new_tokens=NEW)
    assert [each.tokens for each in found] == [written(lm, x).tokens for x in (TEXTS, TEXTS[::-1])]


def test_what_the_model_says_of_itself() -> None:
    lm = t5()
    assert repr(lm) == repr(lm.with_encoder_inputs(TEXTS))
    assert lm.decoder_start_token_id == 0
    told = replace(lm, generation=GenerationDefaults(bos_token_id=4))
    assert told.decoder_start_token_id == 4
    assert (
        replace(lm, generation=GenerationDefaults(decoder_start_token_id=5)).decoder_start_token_id
        == 5
    )


def test_bad_input(tmp_path: Any) -> None:
    lm = t5()
    read = lm.with_encoder_inputs(TEXTS)
    unread = "encoder has read no text: call lm.with_encoder_inputs"
    pages = dict(pages=8, max_len=64)
    reader, (tokens, lengths) = lm.architecture.read, lm.encode(TEXTS)
    empty = lambda room: kvjax.init_cache(CONFIG, batch=2, max_len=room)  # noqa: E731
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    small = InferenceLimits(cache_memory_ratio=1.0, device_memory=weights + 600_000)
    for call, message in {
        lambda: of_decoder(lm, TARGET): unread,
        lambda: kvjax.prefill(lm, TEXTS): unread,
        lambda: kvjax.score(lm, TEXTS, TEXTS): unread,
        lambda: kvjax.rollout(lm, lm.params, TEXTS, max_new_tokens=4): unread,
        lambda: kvjax.compile(lm, max_len=64, batch=2): unread,
        lambda: kvjax.evaluate(
            lm, TEXTS[0], {"int8": "quantized"}
        ): "an evaluation does not support models w",
        lambda: measure(lm, {"raw": "static"}): "a measurement does not support models with an enc",
        lambda: of_decoder(read, TARGET[:1]): r"has read 2 text\(s\), but this call has 1 row",
        lambda: written(lm, cache=written(lm).cache): "a cache was given, but the model's encod",
        lambda: kvjax.PrefixTree(lm, **pages): "prefix trees and engines identify sequences",
        lambda: kvjax.PrefixTree(read, **pages): "prefix trees and engines identify sequences",
        lambda: written(lm, cache="auto"): "moves layers as a sequence grows",
        lambda: lm.with_encoder_inputs(
            TEXTS, kvjax.policy("auto", memory=9999)
        ): "moves layers as a sequence grows",
        lambda: written(lm, limits=InferenceLimits(max_seq_len=100)): "need 150 positions, but max",
        lambda: written(lm, limits=small): r"the cache would take 262,144 bytes of the device",
        lambda: read.on(kvjax.make_mesh(data=2)): "the encoder's cache can't be moved",
        lambda: written(read, [[0]] * 2, mesh=kvjax.make_mesh(data=2)): "move the model first",
        lambda: read.with_params(lm.params): "read its texts with other parameters",
        lambda: read.put(lm.params): "read its texts with other parameters",
        lambda: kvjax.rollout(
            read, lm.params, [[0]] * 2, max_new_tokens=4
        ): "set the new ones first",
        lambda: reader(lm.params, tokens, lengths, empty(40)): "at most 40 tokens",
        lambda: reader(
            lm.params, tokens, lengths, read.params["source"]
        ): "already contains tokens",
        lambda: reader(lm.params, tokens + 60, lengths, empty(150)): "token id .* the vocabulary h",
        lambda: models.load().architecture.read(
            {}, tokens, lengths, empty(150)
        ): "the model has no encoder",
        lambda: written(lm, [[]]): "prompt 0 is empty",
        lambda: written(lm, [[61]]): "token id 61 is out of range",
        lambda: written(lm, temperature=-1): "temperature",
        lambda: models.load().with_encoder_inputs("a"): "the model has no encoder",
        lambda: kvjax.plan(lm, max_len=64): "models with an encoder can't be planned for",
        lambda: kvjax.compile(lm, max_len=64, device=jax.devices()[0]): unread,
        lambda: t5(replace(CONFIG, dtype="float16")): "float16, but T5's activations",
    }.items():
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value).partition("\n---")[0]
