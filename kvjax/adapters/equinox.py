"""Equinox: attention modules with a cache, and models as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Float

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
    **sight: Any,
) -> tuple[Float[Array, "batch new out"], Step]:
    """Causal self-attention by the projections of an ``eqx.nn.MultiheadAttention``, with a cache.

    Equinox's own call is for one row; here all rows go together, for a cache has them.

    Args:
      attention: the module, or one that has ``query_proj``, ``key_proj``, ``value_proj``,
        ``output_proj``, which map a token's features, and ``num_heads``; heads of keys and values
        may be fewer.
      x: what it is given.
      call, layer: of ``kvjax.step``, and the layer's number in it.
      rotary: the table to rotate queries and keys by, None where there are no such positions.
      sight: ``window`` and the others, as ``kvjax.attend`` takes them; ``scale`` is by default the
        inverse root of the channels of a head.

    Returns:
      What the module's call gives of each row, and the call with the layer's tokens.
    """
    queries = _each(attention.query_proj, x)
    head_dim = queries.shape[-1] // attention.num_heads
    q, k, v = (
        jnp.swapaxes(y.reshape(*x.shape[:2], -1, head_dim), 1, 2)
        for y in (queries, _each(attention.key_proj, x), _each(attention.value_proj, x))
    )
    mixed, call = call.attend(layer, q, k, v, rotary=rotary, **sight)
    return _each(attention.output_proj, jnp.swapaxes(mixed, 1, 2).reshape(*x.shape[:2], -1)), call


def as_function(model: Callable[..., Any]) -> tuple["ModelFunction", Any]:
    """``apply`` and ``params`` for ``kvjax.language_model``, of a model whose call takes
    ``(tokens, cache, lengths)`` and gives ``(logits, cache)``."""
    params, static = eqx.partition(model, eqx.is_array)
    leaves, structure = jax.tree.flatten(static)
    return ModelFunction(tuple(leaves), structure), params


@dataclass(frozen=True)
class ModelFunction:
    """A model without its arrays: equal for models of the same form."""

    leaves: tuple[Any, ...]
    structure: Any

    @property
    def __name__(self) -> str:
        """Of the model's class."""
        kind, _ = self.structure.node_data() or (type(self), None)
        return str(kind.__name__)

    def __call__(
        self, params: Any, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the model."""
        model: Any = eqx.combine(params, self.structure.unflatten(self.leaves))
        return model(tokens, cache, lengths)


def _each(layer: Callable[[Array], Array], x: Array) -> Array:
    """A layer of a token's features, of all tokens."""
    return jax.vmap(jax.vmap(layer))(x)
