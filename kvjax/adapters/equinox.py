"""Equinox: attention modules with a cache, and models as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float, PyTree

from kvjax.attention.attend import AttentionOptions
from kvjax.attention.step import Step
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, LayerNumber, Tokens

__all__ = ["as_function", "attend"]


def attend(
    attention: eqx.nn.MultiheadAttention,
    x: Float[Array, "batch new features"],
    call: Step,
    layer: LayerNumber,
    *,
    rotary: RotaryTable | None = None,
    **sight: Unpack[AttentionOptions],
) -> tuple[Float[Array, "batch new out"], Step]:
    """Compute causal self-attention with a cache and the projections of an
    ``eqx.nn.MultiheadAttention``.

    Equinox calls modules on a single row. This function computes all rows together.

    Args:
      attention: the module. Any other object works if it has ``num_heads`` and the functions
        ``query_proj``, ``key_proj``, ``value_proj`` and ``output_proj``, which map the features of
        one token. There may be fewer key-value heads than query heads.
      x: the module's input.
      call: the call that ``kvjax.step`` returned.
      layer: index of the layer.
      rotary: the table that rotates queries and keys; None to rotate nothing.
      sight: ``window`` and the other options of ``kvjax.attend``. By default ``scale`` is
        ``head_dim ** -0.5``.

    Returns:
      The module's output for each row, and the call, to which the layer's keys and values were
      appended.

    Example:
      ```python
      import equinox as eqx
      from kvjax.adapters.equinox import attend

      attention = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
      output, call = attend(attention, jnp.ones((1, 3, 64)), kvjax.step(None, 3), 0)
      ```
    """
    queries = _map_tokens(attention.query_proj, x)
    head_dim = queries.shape[-1] // attention.num_heads
    q, k, v = (
        jnp.swapaxes(y.reshape(*x.shape[:2], -1, head_dim), 1, 2)
        for y in (queries, _map_tokens(attention.key_proj, x), _map_tokens(attention.value_proj, x))
    )
    output, call = call.attend(layer, q, k, v, rotary=rotary, **sight)
    output = jnp.swapaxes(output, 1, 2).reshape(*x.shape[:2], -1)
    return _map_tokens(attention.output_proj, output), call


def as_function(model: eqx.Module) -> tuple["ModelFunction", PyTree]:
    """Split a model into ``apply`` and ``params``, for ``kvjax.language_model``.

    The model is called with ``(tokens, cache, lengths)`` and returns ``(logits, cache)``.

    Example:
      ```python
      import equinox as eqx
      from kvjax.adapters.equinox import as_function, attend


      class Model(eqx.Module):
          embed: jax.Array
          attention: eqx.nn.MultiheadAttention

          def __call__(self, tokens, cache, lengths):
              x, call = self.embed[tokens], kvjax.step(cache, tokens, lengths=lengths)
              output, call = attend(self.attention, x, call, 0)
              return (x + output) @ self.embed.T, call.done()


      attention = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))
      apply, params = as_function(Model(jnp.ones((97, 64)), attention))
      config = dict(num_hidden_layers=1, num_key_value_heads=4, head_dim=16, vocab_size=97)
      model = kvjax.language_model(apply, config, params)
      ```
    """
    params, static = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    return ModelFunction(tuple(leaves), structure), params


@dataclass(frozen=True)
class ModelFunction:
    """A model without its arrays. Two objects are equal if their models have the same structure."""

    leaves: tuple[object, ...]
    structure: Any

    @property
    def __name__(self) -> str:
        """The name of the model's class."""
        cls, _ = self.structure.node_data() or (type(self), None)
        return str(cls.__name__)

    def __call__(
        self, params: PyTree, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the model."""
        model = eqx.combine(params, self.structure.unflatten(self.leaves))
        return model(tokens, cache, lengths)


def _map_tokens(layer: Callable[[Array], Array], x: Array) -> Array:
    """Apply a layer to the features of each token."""
    return jax.vmap(jax.vmap(layer))(x)
