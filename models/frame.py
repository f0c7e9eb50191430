"""The frame that every family stands in: a call's tokens through the layers of a decoder.

A family says what its embeddings, layers and logits are. Where keys and values go, what each row
holds afterwards, and how a mesh has the hidden states, is said here.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Counts, KeysValues, Queries

from .config_families import Config
from .layers import Embedding, Hidden, merge_heads
from .sharding import Rules

Rotary = tuple[RotaryTable | None, ...]
"""The table of each layer, None where it has none."""
Logits = Float[Array, "batch new vocab"]


class LayerContext(NamedTuple):
    """What the layers are told of a call, and hand on: the ``step``, each one's ``rotary``, and
    what a family has ``aside``."""

    step: kvjax.Step
    rotary: Rotary
    aside: Any = None

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: KeysValues | None,
        values: KeysValues | None,
        **sight: Any,
    ) -> tuple[Hidden, "LayerContext"]:
        """Attention of one layer, after its keys and values went to the cache.

        Args:
          layer: which one.
          queries, keys, values: [batch, heads or kv_heads, new, head_dim], unrotated; keys and
            values None where the cache has those of an earlier layer.
          sight: ``scale``, ``window``, ``soft_cap`` and the others of ``kvjax.self_attend``.

        Returns:
          [batch, new, heads * head_dim], and the call with the layer's tokens.
        """
        rotary = self.rotary[layer]
        mixed, step = self.step.attend(layer, queries, keys, values, rotary=rotary, **sight)
        return merge_heads(mixed), self._replace(step=step)


Layer = Callable[[Hidden, LayerContext], tuple[Hidden, LayerContext]]


class Frame(nnx.Module):
    """A decoder with its language-model head: the base of a family's module.

    ``divided``: what of each weight the devices of a mesh divide.
    """

    divided: ClassVar[Rules]

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """The head: the family makes the rest, and that first."""
        size, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(*size, dtype=config.dtype, rngs=rngs)

    @abstractmethod
    def rotary(self, reach: int, limit: int) -> Rotary:
        """The tables for texts of up to ``reach`` tokens, at positions below ``limit``."""

    @abstractmethod
    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        """What the first layer is given."""

    def aside(self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None) -> Any:
        """What else the layers are handed, of the tokens, of what the first one is given, and of
        what an encoder has read."""
        return None

    @abstractmethod
    def layers(self) -> Iterable[Layer]:
        """The layers, in order."""

    @abstractmethod
    def logits(self, x: Hidden) -> Logits:
        """float32 logits of what the last layer gave."""

    def __call__(
        self,
        tokens: Int[Array, "batch new"],
        cache: KVCache | None,
        *,
        lengths: Counts | None,
        last_only: bool,
        max_len: int | None,
        source: KVCache | None = None,
    ) -> tuple[Logits, KVCache | None]:
        """One pass; see ``Architecture.apply``."""
        new = tokens.shape[1]
        if cache is None:
            reach = max_len or new
            limit = max(reach, new)
        else:
            reach, limit = cache.reach, cache.max_len
        context = LayerContext(kvjax.step(cache, new, lengths=lengths), self.rotary(reach, limit))
        x = _on_every_device(self.embed(tokens, context), cache)
        context = context._replace(aside=self.aside(tokens, x, source))
        for layer in self.layers():
            x, context = layer(x, context)
            x = _on_every_device(x, cache)
        if last_only:
            x = _last_real(x, lengths)
        return self.logits(x), context.step.done()


def _on_every_device(x: Hidden, cache: KVCache | None) -> Hidden:
    """The same; on a mesh every device is to have all features of its rows, or the compiler may
    divide them as a table happens to be divided, and collect them again in every layer."""
    spread = None if cache is None else cache.spread
    if spread is None:
        return x
    return lax.with_sharding_constraint(x, spread.sharding(spread.row_spec()))


def _last_real(x: Hidden, lengths: Counts | None) -> Float[Array, "batch 1 hidden"]:
    """Each row's last real token: at ``lengths - 1``, or the last of all."""
    if lengths is None:
        return x[:, -1:]
    at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)
