"""Keras 3 on JAX: attention layers with a cache, and models as functions."""

from dataclasses import dataclass
from typing import Any

import keras
from jaxtyping import PyTree

from kvjax.adapters._running import call_model, check_layer_number, current_call, positions, running
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens

__all__ = ["GroupQueryAttention", "MultiHeadAttention", "as_function", "positions", "running"]


class _IndexedLayer(keras.layers.Layer):
    """A Keras layer that knows its index in the model."""

    def __init__(self, *args: object, layer: int, **options: object) -> None:
        """Create a layer with Keras's arguments and its index ``layer``.

        Raises:
          ValueError: if ``layer`` is not a layer index.
        """
        super().__init__(*args, **options)
        self.layer = check_layer_number(layer)

    def get_config(self) -> dict[str, object]:
        """Return Keras's config and ``layer``."""
        return {**super().get_config(), "layer": self.layer}


class MultiHeadAttention(_IndexedLayer, keras.layers.MultiHeadAttention):
    """``keras.layers.MultiHeadAttention(..., layer=)`` with a cache.

    ``layer`` is the layer's index in the cache. Inside ``running``, the layer appends keys and
    values to the cache and attends to the cache. Attention is then causal and limited to
    ``sliding_window``, and masks are ignored. Outside of ``running``, it is Keras' own layer.

    Example:
      ```python
      from kvjax.adapters.keras import MultiHeadAttention

      x = jnp.ones((1, 3, 64))
      output = MultiHeadAttention(4, 16, layer=0)(x, x, use_causal_mask=True)
      ```
    """

    def _compute_attention(
        self, query: Array, key: Array, value: Array, *args: Any, **options: Any
    ):
        call = current_call()
        if call is None:
            return super()._compute_attention(query, key, value, *args, **options)
        return call.attend(self.layer, query, key, value, window=self._sliding_window), None


class GroupQueryAttention(_IndexedLayer, keras.layers.GroupQueryAttention):
    """``keras.layers.GroupQueryAttention(..., layer=)`` with a cache; see ``MultiHeadAttention``.

    The cache has ``num_key_value_heads`` heads per layer.

    Example:
      ```python
      from kvjax.adapters.keras import GroupQueryAttention

      x = jnp.ones((1, 3, 64))
      output = GroupQueryAttention(16, 4, 2, layer=0)(x, x, use_causal_mask=True)
      ```
    """

    def _compute_attention(
        self, query: Array, key: Array, value: Array, *args: Any, **options: Any
    ):
        call = current_call()
        if call is None:
            return super()._compute_attention(query, key, value, *args, **options)
        # Keras has already repeated keys and values for every query head. Undo this.
        keys, values = (x[:, :, :: self.num_repeats] for x in (key, value))
        return call.attend(self.layer, query, keys, values, window=self.sliding_window), None


def as_function(model: keras.Model) -> tuple["ModelFunction", PyTree]:
    """Split a built model into ``apply`` and ``params``, for ``kvjax.language_model``.

    The model takes tokens [batch, new] of any width and returns logits. Its attention layers must
    come from this module. After training, ``params_of`` returns the new parameters.

    Raises:
      ValueError: if Keras does not use JAX as its backend, or the model is not built.

    Example:
      ```python
      import keras
      from kvjax.adapters.keras import MultiHeadAttention, as_function

      tokens = keras.Input((None,), dtype="int32")
      x = keras.layers.Embedding(97, 64)(tokens)
      x += MultiHeadAttention(4, 16, layer=0)(x, x, use_causal_mask=True)
      apply, params = as_function(keras.Model(tokens, keras.layers.Dense(97)(x)))
      config = dict(num_hidden_layers=1, num_key_value_heads=4, head_dim=16, vocab_size=97)
      model = kvjax.language_model(apply, config, params)
      ```
    """
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras uses {keras.backend.backend()}: set KERAS_BACKEND=jax before importing it"
        )
    if not model.built:
        raise ValueError("the model is not built: call it on tokens first")
    return ModelFunction(model), params_of(model)


def params_of(model: keras.Model) -> dict[str, list[Array]]:
    """Return the arrays of a model's variables, as ``ModelFunction`` needs them."""
    return {
        "trainable": [variable.value for variable in model.trainable_variables],
        "others": [variable.value for variable in model.non_trainable_variables],
    }


@dataclass(frozen=True, eq=False)
class ModelFunction:
    """A model as a pure function of its variables."""

    model: keras.Model

    @property
    def __name__(self) -> str:
        """The model's name."""
        return str(self.model.name)

    def __call__(
        self, params: PyTree, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the model."""

        def logits(tokens: Tokens) -> Array:
            outputs, _ = self.model.stateless_call(
                params["trainable"], params["others"], tokens, training=False
            )
            return outputs

        return call_model(logits, tokens, cache, lengths)
