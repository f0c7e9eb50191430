"""Flax's ``attention_fn`` with a cache, shared by NNX and Linen."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from kvjax.adapters._running import TokensFirst, check_layer_number, current_call
from kvjax.attention.attend import self_attend
from kvjax.core.rotary import RotaryTable


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """An ``attention_fn``.

    Two are equal if they have the same arguments, so programs of equal models are compiled once.
    """

    layer: int
    own: Callable[..., Any]
    rotary: RotaryTable | None
    sight: tuple[tuple[str, Any], ...]

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of ``own``, because Linen passes only arguments that the signature has."""
        return inspect.signature(self.own)

    def _key(self) -> tuple[Any, ...]:
        return self.layer, self.own, id(self.rotary), self.sight

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CachedAttention) and self._key() == other._key()

    def __call__(
        self, query: TokensFirst, key: TokensFirst, value: TokensFirst, *args: Any, **options: Any
    ) -> TokensFirst:
        """Attention on arrays [batch, new, heads, head_dim]."""
        call, sight = current_call(), dict(self.sight)
        if call is None and self.rotary is None and not sight:
            return self.own(query, key, value, *args, **options)
        if options.get("dropout_rate") and not options.get("deterministic", False):
            raise ValueError("kvjax's attention has no dropout: give deterministic=True")
        if call is None:
            heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
            return jnp.swapaxes(self_attend(*heads_first, rotary=self.rotary, **sight), 1, 2)
        return call.attend(self.layer, query, key, value, rotary=self.rotary, **sight)


def cached_attention(
    layer: int, own: Callable[..., Any], rotary: RotaryTable | None, sight: dict[str, Any]
) -> CachedAttention:
    """The ``attention_fn`` of a layer.

    Inside ``running`` it uses the call's cache. Outside it is ``own``, Flax's function, or kvjax's
    uncached attention if the layer has ``rotary`` positions or options in ``sight``.

    Raises:
      ValueError: if ``layer`` is not a layer index.
    """
    return CachedAttention(check_layer_number(layer), own, rotary, tuple(sorted(sight.items())))
