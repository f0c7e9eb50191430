"""Flax Linen: attention modules with a cache, and modules as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import flax.linen as nn
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
    """Create an ``attention_fn`` with a cache, for an ``nn.MultiHeadDotProductAttention``.
    Arguments and errors are as for ``kvjax.adapters.nnx.attention_fn``. Layers inside ``nn.scan``
    can't use it. Their modules pass a ``kvjax.attention.Step`` from layer to layer instead.

    Example:
      ```python
      from flax import linen as nn
      from kvjax.adapters.linen import attention_fn

      attention = nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn(0))
      output, params = attention.init_with_output(jax.random.key(0), jnp.ones((1, 3, 64)))
      ```
    """
    return cached_attention(layer, nn.dot_product_attention, rotary, sight)


def as_function(module: nn.Module) -> "ModuleFunction":
    """Turn a module into ``apply`` for ``kvjax.language_model``. The module's variables are the
    parameters.

    If the module's ``__call__`` has an argument ``cache``, its arguments must be named
    ``(tokens, cache, lengths)``, and it returns ``(logits, cache)``. Otherwise, it is called with
    tokens inside ``running`` and returns logits. Its attention must then use ``attention_fn``.

    Example:
      ```python
      from flax import linen as nn
      from kvjax.adapters.linen import as_function, attention_fn


      class Model(nn.Module):
          @nn.compact
          def __call__(self, tokens):
              embed = nn.Embed(97, 64)
              x = embed(tokens)
              x += nn.MultiHeadDotProductAttention(4, attention_fn=attention_fn(0))(x)
              return embed.attend(x)


      params = Model().init(jax.random.key(0), jnp.ones((1, 3), jnp.int32))
      config = dict(num_hidden_layers=1, num_key_value_heads=4, head_dim=16, vocab_size=97)
      model = kvjax.language_model(as_function(Model()), config, params)
      ```
    """
    return ModuleFunction(module)


@dataclass(frozen=True)
class ModuleFunction:
    """A module as a function. Two objects are equal if their modules are equal."""

    module: nn.Module

    @property
    def __name__(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    def __call__(
        self, params: PyTree, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the module."""
        return call_model(self.module.bind(params), tokens, cache, lengths)
