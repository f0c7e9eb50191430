"""KerasHub: language models with kvjax's cache instead of ``call_with_cache``.

KerasHub's attention layers look for a serving context, which was made for its vLLM bridge. The
context holds the positions of tokens and an attention function. This adapter supplies kvjax's
attention function. Layers are numbered in the order in which they are called.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree
from keras import Model, StatelessScope
from keras_hub.src.vllm.context import vllm_context_scope  # pyright: ignore[reportMissingImports]

from kvjax.adapters import keras
from kvjax.adapters.function_model import language_model
from kvjax.attention.step import step
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens
from kvjax.generation.loaded_model import LanguageModel

__all__ = ["as_language_model"]


def as_language_model(model: Model, **options: Any) -> LanguageModel:
    """Turn a ``keras_hub`` ``CausalLM`` into a model for ``kvjax.generate`` and other functions.

    Args:
      model: a model whose attention layers support KerasHub's vLLM bridge (KerasHub 0.32 and
        later): Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3 and others.
      options: ``tokenizer`` (by default the model's own, if it has one), ``eos_token_ids`` and
        other options of ``kvjax.language_model``.

    Raises:
      ValueError: if Keras does not use JAX as its backend, or the backbone lacks an attribute, such
        as the number of heads.

    Example:
      ```python
      import keras_hub
      from kvjax.adapters.keras_hub import as_language_model

      backbone = keras_hub.models.Llama3Backbone(  # or Llama3CausalLM.from_preset("llama3.2_1b")
          vocabulary_size=128, num_layers=2, num_query_heads=4, num_key_value_heads=2,
          hidden_dim=64, intermediate_dim=96,
      )
      model = as_language_model(keras_hub.models.Llama3CausalLM(backbone, preprocessor=None))
      result = kvjax.generate(model, [[1, 2, 3]], max_new_tokens=8)
      ```
    """
    backbone = model.backbone
    heads = _number(backbone, "num_query_heads", "num_heads")
    dtype = str(backbone.compute_dtype)
    config = SimpleNamespace(
        num_hidden_layers=_number(backbone, "num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=_number(backbone, "num_key_value_heads", default=heads),
        head_dim=_number(
            backbone, "head_dim", default=_number(backbone, "hidden_dim", default=0) // heads
        ),
        hidden_size=_number(backbone, "hidden_dim"),
        vocab_size=_number(backbone, "vocabulary_size"),
        dtype=dtype,
    )
    _, params = keras.as_function(backbone)
    own = model.preprocessor.tokenizer if model.preprocessor is not None else None
    if own is not None and "tokenizer" not in options:
        options = {"tokenizer": _Tokenizer(own), **options}
    if own is not None and "eos_token_ids" not in options:
        options = {"eos_token_ids": getattr(own, "end_token_id", None), **options}
    return language_model(CausalFunction(backbone), config, params, **options)


@dataclass(frozen=True, eq=False)
class CausalFunction:
    """A backbone and its tied output head as a pure function."""

    backbone: Model

    @property
    def __name__(self) -> str:
        """The name of the backbone."""
        return str(self.backbone.name)

    def __call__(
        self, params: PyTree, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the model. Its layers receive every token as a separate row."""
        batch, new = tokens.shape
        call, layer = step(cache, tokens, lengths=lengths), 0

        def attend(
            kv_cache: None,
            query: Array,
            key: Array,
            value: Array,
            scale: float,
            head_dim: int,
            heads: int,
            kv_heads: int,
            *,
            sliding_window: int | None = None,
            soft_cap: float | None = None,
        ) -> tuple[None, Array]:
            nonlocal call, layer
            q, k, v = (
                jnp.swapaxes(x.reshape(batch, new, count, head_dim), 1, 2)
                for x, count in ((query, heads), (key, kv_heads), (value, kv_heads))
            )
            output, call = call.attend(
                layer, q, k, v, scale=scale, window=sliding_window, soft_cap=soft_cap
            )
            layer += 1
            return kv_cache, jnp.swapaxes(output, 1, 2).reshape(batch * new, heads * head_dim)

        positions = jnp.broadcast_to(call.positions, (batch, new)).reshape(-1)
        flat = tokens.reshape(-1, 1)
        inputs = {"token_ids": flat, "padding_mask": jnp.ones_like(flat)}
        with vllm_context_scope(paged_attention_func=attend, positions=positions):
            hidden, _ = self.backbone.stateless_call(
                params["trainable"], params["others"], inputs, training=False
            )
        if layer != self.backbone.num_layers:
            raise ValueError(
                f"{layer} of {self.backbone.num_layers} attention layers of {self.__name__} use "
                "KerasHub's serving context: the others can't use another cache"
            )
        return self._logits(params, hidden.reshape(batch, new, -1)), call.done()

    def _logits(self, params: PyTree, hidden: Array) -> Array:
        variables = [
            *zip(self.backbone.trainable_variables, params["trainable"], strict=True),
            *zip(self.backbone.non_trainable_variables, params["others"], strict=True),
        ]
        with StatelessScope(variables):
            return self.backbone.token_embedding(hidden, reverse=True)


class _Tokenizer:
    """A KerasHub tokenizer that returns ids as lists."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return [int(i) for i in self.tokenizer.tokenize(text)]

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return str(self.tokenizer.detokenize(ids))


def _number(backbone: object, *names: str, default: int | None = None) -> int:
    for name in names:
        if getattr(backbone, name, None) is not None:
            return int(getattr(backbone, name))
    if default:
        return default
    raise ValueError(f"the backbone, a {type(backbone).__name__}, has no {names[0]}")
