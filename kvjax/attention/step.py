"""A call, from its tokens to the cache that has them: what layers have in common is said once."""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from kvjax.attention.attend import attend, self_attend
from kvjax.cache.appending import advance, append, begin_append
from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.state import KVCache
from kvjax.cache.storing import positions_from
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import AttentionOutput, Counts, KeysValues, LayerNumber, Positions, Queries
from kvjax.core.validation import as_int


@pytree_dataclass
class Step:
    """A call that has begun, as ``step`` gives it.

    ``cache``: with what the layers so far have appended; None where there is none. ``new``: tokens
    a row.
    """

    cache: KVCache | None
    new: int = static_field()

    @property
    def positions(self) -> Positions:
        """Where the call's tokens stand: int32[batch, new], [1, new] without a cache."""
        if self.cache is None:
            return jnp.arange(self.new, dtype=jnp.int32)[None]
        return positions_from(self.cache.length, self.new)

    @automatic_axes
    def attend(
        self,
        layer: LayerNumber,
        queries: Queries,
        keys: KeysValues | None = None,
        values: KeysValues | None = None,
        *,
        rotary: RotaryTable | None = None,
        **sight: Any,
    ) -> tuple[AttentionOutput, "Step"]:
        """A layer's attention: its keys and values are appended, and its queries attend.

        Args:
          layer: which layer.
          queries: [batch, heads, new, head_dim], unrotated.
          keys, values: [batch, kv_heads, new, head_dim], keys unrotated; None for a layer that
            reads those of an earlier one (``layer_sources``).
          rotary: the layer's table, to rotate queries and keys by. None where they are rotated
            already, or have no rotary positions: ``Unrotated`` has nothing to undo then, and what
            is as far as sinks stays there, however long the text is.
          sight: ``scale``, ``window``, ``sinks``, ``chunk``, ``soft_cap`` and ``bias``, as
            ``kvjax.attend`` takes them.

        Returns:
          [batch, heads, new, head_dim] in the queries' dtype, and the call with the layer's tokens.

        Raises:
          ValueError: as ``kvjax.append`` and ``kvjax.attend``.
        """
        cache = self.cache
        if (keys is None) != (values is None):
            raise ValueError("keys and values are given together, or neither")
        if cache is None:
            if keys is None or values is None:
                raise ValueError(
                    f"layer {layer} is given no keys and values: without a cache there are none of "
                    "an earlier layer, so give those again"
                )
            self._check_new(queries)
            return self_attend(queries, keys, values, rotary=rotary, **sight), self
        if keys is not None and values is not None:
            cache = append(cache, layer, keys, values, rotary=rotary)
        output = attend(queries, cache, layer, rotary=rotary, **sight)
        return output, replace(self, cache=_between_layers(cache))

    @automatic_axes
    def done(self) -> KVCache | None:
        """The cache, with the call's tokens counted; None where there is none.

        Raises:
          ValueError: if a layer has not been given its keys and values.
        """
        return None if self.cache is None else advance(self.cache, self.new)

    def _check_new(self, queries: Queries) -> None:
        if queries.ndim == 4 and queries.shape[2] != self.new:
            raise ValueError(
                f"queries of {queries.shape[2]} token(s), but the call began with {self.new}"
            )


def _between_layers(cache: KVCache) -> KVCache:
    """A cache as a scan over the layers of its stacks carries it: without what queries of the last
    one were shown of a long call."""
    if cache.stacks is None:
        return cache
    layers = tuple(replace(layer, strip=None, strip_of=None) for layer in cache.layers)
    return replace(cache, layers=layers)


@automatic_axes
def step(cache: KVCache | None, tokens: Any, *, lengths: Counts | None = None) -> Step:
    """Begin a call: the one object that its layers are handed::

        call = kvjax.step(cache, tokens, lengths=lengths)
        mixed, call = call.attend(layer, queries, keys, values, rotary=table)
        ...                                                    # the other layers
        cache = call.done()

    Args:
      cache: the cache; donate it to write in place. None for the same without one: every token
        sees those before it in the call.
      tokens: [batch, new, ...], of which the shape is read, or ``new``.
      lengths: int32[batch], how many of ``new`` are real tokens, by default all. Without a cache
        what stands behind them is seen by no token before, and they are not looked at.

    Raises:
      ValueError: if the cache is none or has a call that was not ended, ``tokens`` are of another
        batch, or ``lengths`` is wrong, as of ``kvjax.append``.
    """
    shape = jnp.shape(tokens)
    if len(shape) == 1:
        raise ValueError(f"tokens must be [batch, new], or a number of them, got {list(shape)}")
    new = as_int("tokens", tokens, 1) if not shape else as_int("new", shape[1], 1)
    if cache is None:
        return Step(None, new)
    cache = validated("kvjax.step", cache)
    if shape and shape[0] != cache.batch:
        raise ValueError(f"tokens of {shape[0]} row(s), and the cache has {cache.batch}")
    if cache.spread is not None:
        cache.spread.check_context()
    return Step(begin_append(cache, new, lengths), new)
