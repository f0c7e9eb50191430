"""Flax NNX: modules with a cache, and as functions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flax import nnx

from kvjax.adapters._flax_attention import cached_attention
from kvjax.adapters._running import TokensFirst, call_model, positions, running
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, Tokens

__all__ = ["as_function", "attention_fn", "positions", "running"]


def attention_fn(
    layer: int, *, rotary: RotaryTable | None = None, **sight: Any
) -> Callable[..., TokensFirst]:
    """The ``attention_fn`` of an ``nnx.MultiHeadAttention``, with a cache: inside ``running`` the
    layer's keys and values are appended, and its queries attend. Causal, as generation is; masks
    are not looked at there. Outside it is ``nnx.dot_product_attention``, or, of a layer with rotary
    positions or a sight, kvjax's own, causal as well.

    Args:
      layer: its number.
      rotary: the table to rotate queries and keys by, None where there are no such positions.
      sight: ``scale``, ``window`` and the others, as ``kvjax.attend`` takes them.

    Raises:
      ValueError: if ``layer`` is no number.
    """
    return cached_attention(layer, nnx.dot_product_attention, rotary, sight)


def as_function(module: nnx.Module) -> tuple["ModuleFunction", Any]:
    """``apply`` and ``params`` for ``kvjax.language_model``, of a module.

    Its call takes ``(tokens, cache, lengths)``, by these names, and gives ``(logits, cache)``; or
    it has no ``cache``, and gives logits of tokens, where its attention is of ``attention_fn``:
    then it is run inside ``running``.
    What an update of ``nnx.state(module)`` has changed, ``as_function`` is asked for again, and the
    function is the same, so nothing is compiled again.
    """
    graph, params = nnx.split(module)
    return ModuleFunction(graph), params


@dataclass(frozen=True)
class ModuleFunction:
    """A module without its state: equal for modules of the same form."""

    graph: Any

    @property
    def __name__(self) -> str:
        """Of the module's class."""
        return str(getattr(self.graph.nodes[0], "type", type(self.graph)).__name__)

    def __call__(
        self, params: Any, tokens: Tokens, cache: KVCache | None, lengths: Counts | None
    ) -> tuple[Array, KVCache | None]:
        """Run the module."""
        return call_model(nnx.merge(self.graph, params), tokens, cache, lengths)
