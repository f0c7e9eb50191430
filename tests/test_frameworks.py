"""Adapters of frameworks' own attention layers, with the real packages."""

import importlib
import importlib.util
import inspect
import os
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax.adapters import linen
from kvjax.adapters import nnx as ours
from kvjax.adapters._running import running
from kvjax.core.compat import flax_0_12_list

VOCAB, WIDTH, HEADS = 61, 32, 4
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (2, 20)).astype(np.int32)
TABLE = kvjax.rotary_table(10000.0 ** (-np.arange(0, 8, 2) / 8))
CONFIG: dict[str, Any] = {
    "num_hidden_layers": 2, "num_key_value_heads": HEADS, "head_dim": 8, "vocab_size": VOCAB,
}  # fmt: skip


def in_chunks(lm: kvjax.LanguageModel, policy: Any = None) -> np.ndarray:
    """Logits of the texts in uneven chunks."""
    cache, found = kvjax.init_cache(lm.config, policy, batch=2, max_len=32), []
    for start, end in ((0, 5), (5, 6), (6, 20)):
        logits, cache = lm.apply(lm.params, TOKENS[:, start:end], cache)
        found.append(logits)
    kvjax.check(cache)
    return np.concatenate(found, axis=1)


class Model(nnx.Module):
    """Layers of NNX's attention over an embedding, with fewer heads of keys."""

    def __init__(self, kv_heads: int | None = None, **options: Any):
        rngs, fewer = nnx.Rngs(0), {} if kv_heads is None else {"num_kv_heads": kv_heads}
        self.embed = nnx.Embed(VOCAB, WIDTH, embedding_init=nnx.initializers.normal(1), rngs=rngs)
        self.layers = flax_0_12_list(
            nnx.MultiHeadAttention(
                HEADS, WIDTH, decode=False, rngs=rngs, **fewer,
                attention_fn=ours.attention_fn(layer, **options),
            )
            for layer in range(2)
        )  # fmt: skip

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x, mask=nnx.make_causal_mask(tokens))
        return self.embed.attend(x)


OTHERS = [pytest.param(each, marks=pytest.mark.rare) for each in ({}, {"kv_heads": 2})]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rotary": TABLE, "window": 6}, *OTHERS])
def test_attention_of_nnx(options):
    given = inspect.signature(nnx.MultiHeadAttention).parameters
    if "kv_heads" in options and "num_kv_heads" not in given:
        pytest.skip(f"all heads of Flax {flax.__version__} have keys of their own")
    module = Model(**options)
    heads = options.get("kv_heads", HEADS)
    windows = (options.get("window"),) * 2
    apply, params = ours.as_function(module)
    lm = kvjax.language_model(
        apply, {**CONFIG, "num_key_value_heads": heads, "windows": windows}, params
    )
    np.testing.assert_allclose(in_chunks(lm, "hybrid"), module(jnp.asarray(TOKENS)), atol=2e-5)


class Layers(nn.Module):
    """Layers of Linen's attention over an embedding."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCAB, WIDTH, embedding_init=nn.initializers.normal(1))
        x = embed(tokens)
        for layer in range(2):
            attention = nn.MultiHeadDotProductAttention(
                HEADS, attention_fn=linen.attention_fn(layer), name=f"layer_{layer}"
            )
            x = x + attention(x, mask=nn.make_causal_mask(tokens))
        return embed.attend(x)


@pytest.mark.slow
def test_attention_of_linen():
    module = Layers()
    params = module.init(jax.random.key(0), jnp.asarray(TOKENS))
    lm = kvjax.language_model(linen.as_function(module), CONFIG, params)
    np.testing.assert_allclose(in_chunks(lm), module.apply(params, TOKENS), atol=2e-5)


def test_what_a_running_call_refuses():
    module = Model()
    lm = kvjax.language_model(*ours.as_function(module)[:1], CONFIG, ours.as_function(module)[1])
    cache = kvjax.init_cache(lm.config, batch=2, max_len=32)
    with running(cache, TOKENS) as call:
        module(jnp.asarray(TOKENS))
        call.done()
        with pytest.raises(ValueError, match="the call has ended"):
            module(jnp.asarray(TOKENS))
    with (
        running(cache, TOKENS) as call,
        pytest.raises(ValueError, match="were not appended to"),
    ):
        call.done()
    with pytest.raises(ValueError, match="layer must be an integer"):
        ours.attention_fn("first")  # type: ignore[arg-type]
    dropped = nnx.MultiHeadAttention(
        HEADS, WIDTH, dropout_rate=0.5, decode=False, attention_fn=ours.attention_fn(0),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    with running(cache, TOKENS), pytest.raises(ValueError, match="deterministic=True"):
        dropped(jnp.ones((2, 20, WIDTH)), deterministic=False)


def keras_model(kind: str) -> Any:
    """A model of Keras, with learned positions."""
    import keras

    from kvjax.adapters import keras as cached

    keras.utils.set_random_seed(0)

    class Places(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(64, WIDTH), initializer="random_normal")

        def call(self, tokens: Any) -> Any:
            return keras.ops.take(self.table, cached.positions(tokens), axis=0)

    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(VOCAB, WIDTH, embeddings_initializer="random_normal")(tokens)
    x = x + Places()(tokens)
    for layer in range(2):
        if kind == "group":
            attention: Any = cached.GroupQueryAttention(8, HEADS, 2, layer=layer)
        else:
            window = {"sliding_window": 6} if kind == "window" else {}
            attention = cached.MultiHeadAttention(HEADS, 8, layer=layer, **window)
        x = x + attention(x, x, use_causal_mask=True)
    return keras.Model(tokens, keras.layers.Dense(VOCAB)(x))


WHY = {
    "keras_hub": "which brings TensorFlow: .ci/run has it without, on the newest JAX",
    "tunix": "the extra `tunix`, which wants another Transformers than the oracle",
}


def needed(package: str) -> None:
    """Skip where a package is not installed."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, {WHY.get(package, 'of the extra `adapters`')}")


@pytest.mark.parametrize("kind", ["group", "all", "window"])
@pytest.mark.slow
def test_attention_of_keras(kind):
    needed("keras")
    from kvjax.adapters.keras import as_function

    model = keras_model(kind)
    apply, params = as_function(model)
    config = {**CONFIG, "num_key_value_heads": 2 if kind == "group" else HEADS}
    lm = kvjax.language_model(apply, config, params)
    np.testing.assert_allclose(in_chunks(lm), model(TOKENS), atol=2e-5)
    found = kvjax.generate(lm, TOKENS[:, :5].tolist(), max_new_tokens=4, cache="static")
    wanted = kvjax.generate(lm, TOKENS[:, :5].tolist(), max_new_tokens=4, use_cache=False)
    assert found.tokens == wanted.tokens
    assert model.layers[3].get_config()["name"] == model.layers[3].name


OF_KERAS_HUB = "gemma", "gemma3", "gpt2", "mistral", "qwen", "qwen3"


def keras_hub_model(family: str) -> Any:
    import keras_hub  # pyright: ignore[reportMissingImports]

    models = keras_hub.models
    some = {"vocabulary_size": VOCAB, "num_layers": 2, "hidden_dim": WIDTH, "intermediate_dim": 48}
    if family == "llama":
        own = models.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, **some)
        return models.LlamaCausalLM(backbone=own, preprocessor=None)
    if family == "gemma3":
        own = models.Gemma3Backbone(
            image_size=16, num_query_heads=4, num_key_value_heads=2, head_dim=8,
            use_sliding_window_attention=True, sliding_window_size=8, vision_encoder=None, **some,
        )  # fmt: skip
        return models.Gemma3CausalLM(backbone=own, preprocessor=None)
    if family == "gpt2":
        own = models.GPT2Backbone(num_heads=4, max_sequence_length=64, **some)
        return models.GPT2CausalLM(backbone=own, preprocessor=None)
    names = {"mistral": "Mistral", "qwen": "Qwen", "qwen3": "Qwen3", "gemma": "Gemma"}
    if family in names:
        more = {"head_dim": 8} if family in ("qwen3", "gemma") else {}
        backbone, whole = (
            getattr(models, names[family] + part) for part in ("Backbone", "CausalLM")
        )
        own = backbone(num_query_heads=4, num_key_value_heads=2, **more, **some)
        return whole(backbone=own, preprocessor=None)
    own = models.Phi3Backbone(num_query_heads=4, num_key_value_heads=2, **some)
    return models.Phi3CausalLM(backbone=own, preprocessor=None)


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(each, marks=pytest.mark.rare) for each in OF_KERAS_HUB)],
)
def test_models_of_keras_hub(family):
    needed("keras_hub")
    from kvjax.adapters.keras_hub import as_language_model

    model = keras_hub_model(family)
    lm = as_language_model(model)
    own = model.backbone({"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)})
    wanted = np.asarray(model.backbone.token_embedding(own, reverse=True))
    np.testing.assert_allclose(lm.apply(lm.params, TOKENS), wanted, atol=1e-5)
    np.testing.assert_allclose(in_chunks(lm), wanted, atol=1e-5)
    found = kvjax.generate(lm, TOKENS[:, :5].tolist(), max_new_tokens=3, cache=kvjax.policy(bits=8))
    assert [len(row) for row in found.tokens] == [3, 3]


def test_a_model_of_keras_hub_that_takes_no_cache_is_refused():
    needed("keras_hub")
    from kvjax.adapters.keras_hub import as_language_model

    lm = as_language_model(keras_hub_model("phi3"))
    with pytest.raises(ValueError, match="0 of 2 attention layers"):
        lm.apply(lm.params, TOKENS)


class TunixTokenizer:
    """What tunix asks of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 50 + 5 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def test_rollouts_of_tunix():
    needed("tunix")
    base: Any = importlib.import_module("tunix.rl.rollout.base_rollout")
    BaseRollout, RolloutConfig = base.BaseRollout, base.RolloutConfig

    from kvjax.adapters.tunix import KvjaxRollout

    actor = Model()
    worker = KvjaxRollout(actor, TunixTokenizer(), config=CONFIG)
    assert isinstance(worker, BaseRollout) and worker.model() is actor
    assert (worker.pad_id(), worker.eos_id()) == (0, 2)
    asked = RolloutConfig(
        max_tokens_to_generate=6, temperature=1.0, max_prompt_length=8, return_logprobs=True,
        seed=jax.random.PRNGKey(3), eos_tokens=[],
    )  # fmt: skip
    prompts, before = ["abc", "abcdef"], []
    for step in range(3):
        found = worker.generate(prompts, asked)
        assert [len(row) for row in found.tokens] == [6, 6]
        assert found.left_padded_prompt_tokens.shape == (2, 8)
        assert found.left_padded_prompt_tokens[0].tolist() == [0, 0, 0, 0, 1, 52, 53, 54]
        logps = worker.get_per_token_logps(
            jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(np.stack(found.tokens))
        )
        np.testing.assert_allclose(np.stack(found.logprobs), logps, atol=1e-4)
        before.append(np.stack(found.logprobs))
        # The trainer's own state, and a part of it in a wider dtype.
        new = jax.tree.map(lambda x: x * 1.1, nnx.state(actor, nnx.Param))
        worker.update_params(new, (nnx.Param,)) if step else nnx.update(actor, new)
    assert not np.allclose(before[0], before[1]) and not np.allclose(before[1], before[2])
    with pytest.raises(ValueError, match="max_prompt_length is 8"):
        worker.generate(["a" * 20], asked)
