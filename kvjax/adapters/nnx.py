"""Flax NNX: attention modules with a cache, and modules as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

from flax import nnx
from jaxtyping import PyTree

from kvjax.adapters._running import TokensFirst, cached_attention, call_model, positions, running
from kvjax.attention.attend import AttentionOptions
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, Tokens

__all__ = ["as_function", "attention_fn", "positions", "running"]


def attention_fn(
    layer: int, *, rotary: RotaryTable | None = None, **sight: Unpack[AttentionOptions]
) -> Callable[..., TokensFirst]:
    """Create an ``attention_fn`` with a cache, for an ``nnx.MultiHeadAttention``.

    Inside ``running``, the function appends the layer's keys and values to the cache and attends to
    the cache. Attention is then causal, and masks are ignored. Outside of ``running``, the function
    calls ``nnx.dot_product_attention``. If ``rotary`` or an option of ``sight`` is given, it calls
    kvjax's causal attention without a cache instead.

    Args:
      layer: index of the layer.
      rotary: the table that rotates queries and keys; None to rotate nothing.
      sight: ``scale``, ``window`` and the other options of ``kvjax.attend``.

    Raises:
      ValueError: if ``layer`` is not a layer index.

    Example:
      ```python
      from flax import nnx
      from kvjax.adapters.nnx import attention_fn

      attention = nnx.MultiHeadAttention(
          4, 64, decode=False, attention_fn=attention_fn(0), rngs=nnx.Rngs(0)
      )
      output = attention(jnp.ones((1, 3, 64)))
      ```
    """
    return cached_attention(layer, nnx.dot_product_attention, rotary, sight)


def as_function(module: nnx.Module) -> tuple["ModuleFunction", PyTree]:
    """Split a module into ``apply`` and ``params``, for ``kvjax.language_model``.

    If the module's ``__call__`` has an argument ``cache``, its arguments must be named
    ``(tokens, cache, lengths)``, and it returns ``(logits, cache)``. Otherwise, it is called with
    tokens inside ``running`` and returns logits. Its attention must then use ``attention_fn``.

    After updating the module's state, call ``as_function`` again. The new ``apply`` is equal to the
    earlier one, so nothing is compiled again.

    Example:
      ```python
      from flax import nnx
      from kvjax.adapters.nnx import as_function, attention_fn


      class Model(nnx.Module):
          def __init__(self, rngs):
              own = dict(decode=False, attention_fn=attention_fn(0), rngs=rngs)
              self.embed = nnx.Embed(97, 64, rngs=rngs)
              self.attention = nnx.MultiHeadAttention(4, 64, **own)

          def __call__(self, tokens):
              x = self.embed(tokens)
              return self.embed.attend(x + self.attention(x))


      apply, params = as_function(Model(nnx.Rngs(0)))
      config = dict(num_hidden_layers=1, num_key_value_heads=4, head_dim=16, vocab_size=97)
      model = kvjax.language_model(apply, config, params)
      ```
    """
    graph, params = nnx.split(module)
    return ModuleFunction(graph), params


@dataclass(frozen=True)
class ModuleFunction:
    """A module without its state. Two objects are equal if their modules have the same
    structure."""

    graph: nnx.GraphDef

    @property
    def __name__(self) -> str:
        """The name of the module's class."""
        return str(getattr(self.graph.nodes[0], "type", type(self.graph)).__name__)

    def __call__(
        self, params: PyTree, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the module."""
        return call_model(nnx.merge(self.graph, params), tokens, cache, lengths)
