"""Flax Linen: modules with a cache, and as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn

from kvjax.adapters._flax_attention import cached_attention
from kvjax.adapters._running import TokensFirst, call_model, positions, running
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, Tokens

__all__ = ["as_function", "attention_fn", "positions", "running"]


def attention_fn(
    layer: int, *, rotary: RotaryTable | None = None, **sight: Any
) -> Callable[..., TokensFirst]:
    """The ``attention_fn`` of an ``nn.MultiHeadDotProductAttention``, with a cache; as that of
    ``kvjax.adapters.nnx``. Not for layers in ``nn.scan``, whose modules hand a call on instead."""
    return cached_attention(layer, nn.dot_product_attention, rotary, sight)


def as_function(module: nn.Module) -> "ModuleFunction":
    """``apply`` for ``kvjax.language_model``, of a module, whose variables are the parameters.

    Its call takes ``(tokens, cache, lengths)``, by these names, and gives ``(logits, cache)``; or
    it has no ``cache``, and gives logits of tokens, where its attention is of ``attention_fn``:
    then it is run inside ``running``.
    """
    return ModuleFunction(module)


@dataclass(frozen=True)
class ModuleFunction:
    """A module as a function: equal for equal modules."""

    module: nn.Module

    @property
    def __name__(self) -> str:
        """Of the module's class."""
        return type(self.module).__name__

    def __call__(
        self, params: Any, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the module."""
        return call_model(self.module.bind(params), tokens, cache, lengths)
