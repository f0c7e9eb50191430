"""Keras 3 on JAX: attention layers with a cache, and models as functions."""

from dataclasses import dataclass
from typing import Any

import keras

from kvjax.adapters._running import call_model, check_layer_number, current_call, positions, running
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Counts, Tokens

__all__ = ["GroupQueryAttention", "MultiHeadAttention", "as_function", "positions", "running"]


class _Numbered(keras.layers.Layer):
    """A layer that knows its number."""

    def __init__(self, *args: Any, layer: int, **options: Any) -> None:
        """Make one; arguments as of Keras' own, and ``layer``, its number.

        Raises:
          ValueError: if ``layer`` is no number.
        """
        super().__init__(*args, **options)
        self.layer = check_layer_number(layer)

    def get_config(self) -> dict[str, Any]:
        """As Keras', with ``layer``."""
        return {**super().get_config(), "layer": self.layer}


class MultiHeadAttention(_Numbered, keras.layers.MultiHeadAttention):
    """``keras.layers.MultiHeadAttention(..., layer=)`` with a cache: inside ``running`` its keys
    and values are appended, and its queries attend. Causal there, whatever masks it is given, and
    within its ``sliding_window``."""

    def _compute_attention(
        self, query: Array, key: Array, value: Array, *args: Any, **options: Any
    ) -> Any:
        call = current_call()
        if call is None:
            return super()._compute_attention(query, key, value, *args, **options)
        return call.attend(self.layer, query, key, value, window=self._sliding_window), None


class GroupQueryAttention(_Numbered, keras.layers.GroupQueryAttention):
    """``keras.layers.GroupQueryAttention(..., layer=)`` with a cache, as ``MultiHeadAttention``
    here; the cache has ``num_key_value_heads`` heads."""

    def _compute_attention(
        self, query: Array, key: Array, value: Array, *args: Any, **options: Any
    ) -> Any:
        call = current_call()
        if call is None:
            return super()._compute_attention(query, key, value, *args, **options)
        # Keras has given every query head a copy of its own.
        keys, values = (x[:, :, :: self.num_repeats] for x in (key, value))
        return call.attend(self.layer, query, keys, values, window=self.sliding_window), None


def as_function(model: keras.Model) -> tuple["ModelFunction", Any]:
    """``apply`` and ``params`` for ``kvjax.language_model``, of a model that is built, takes tokens
    [batch, new] of any width, and gives logits; its attention layers are of this module. What
    training has changed, ``params_of`` tells again.

    Raises:
      ValueError: if Keras runs on another backend, or the model is not built.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=jax before it is imported"
        )
    if not model.built:
        raise ValueError("the model is not built: call it on some tokens first")
    return ModelFunction(model), params_of(model)


def params_of(model: keras.Model) -> dict[str, list[Array]]:
    """The arrays of a model's variables, as its function takes them."""
    return {
        "trainable": [each.value for each in model.trainable_variables],
        "others": [each.value for each in model.non_trainable_variables],
    }


@dataclass(frozen=True, eq=False)
class ModelFunction:
    """A model as a pure function of its variables."""

    model: keras.Model

    @property
    def __name__(self) -> str:
        """The model's."""
        return str(self.model.name)

    def __call__(
        self, params: Any, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the model."""

        def logits(tokens: Tokens) -> Array:
            found, _ = self.model.stateless_call(
                params["trainable"], params["others"], tokens, training=False
            )
            return found

        return call_model(logits, tokens, cache, lengths)
