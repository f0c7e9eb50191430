"""A step: one call of a model, in which every layer appends its keys and values and attends."""

from dataclasses import replace
from typing import Unpack

import jax.numpy as jnp
from jax.typing import ArrayLike

from kvjax.attention.attend import AttentionOptions, attend, self_attend
from kvjax.cache.appending import advance, append, begin_append
from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.state import KVCache
from kvjax.cache.storing import positions_from
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import AttentionOutput, Counts, KeysValues, LayerNumber, Positions, Queries
from kvjax.core.validation import ArgumentError, as_int


@pytree_dataclass
class Step:
    """A call (forward pass) of a model in progress. Create it with ``step``.

    ``cache`` is the cache, to which earlier layers have already appended keys and values. It is
    None in a pass without a cache. ``new`` is the number of tokens per row.

    Example:
      ```python
      call = kvjax.step(None, 3)  # without a cache, as in training
      queries = jnp.ones((1, 4, 3, 64))
      keys = values = jnp.ones((1, 2, 3, 64))
      output, call = call.attend(0, queries, keys, values)
      ```
    """

    cache: KVCache | None
    new: int = static_field()

    @property
    def positions(self) -> Positions:
        """The positions of the new tokens, int32[batch, new], or int32[1, new] without a cache."""
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
        **sight: Unpack[AttentionOptions],
    ) -> tuple[AttentionOutput, "Step"]:
        """Append a layer's keys and values, and attend with its queries.

        Args:
          layer: the index of the layer.
          queries: [batch, heads, new, head_dim], unrotated.
          keys, values: [batch, kv_heads, new, head_dim], keys unrotated. None for a layer that
            reuses the keys and values of an earlier layer (``layer_sources``).
          rotary: the layer's table, which rotates queries and keys. None if they are already
            rotated, or have no rotary positions. With None, the codec ``Unrotated`` stores keys as
            they are, and the distance to attention sinks is not capped.
          sight: ``scale``, ``window``, ``sinks``, ``chunk``, ``soft_cap`` and ``bias``, see
            ``kvjax.attend``.

        Returns:
          The output, [batch, heads, new, head_dim] in the queries' dtype, and the step, whose cache
          now has the layer's keys and values.

        Raises:
          ValueError: for the same reasons as ``kvjax.append`` and ``kvjax.attend``.
        """
        cache = self.cache
        if (keys is None) != (values is None):
            raise ValueError("pass both keys and values, or neither")
        if cache is None:
            if keys is None or values is None:
                raise ValueError(
                    f"layer {layer} has no keys and values: without a cache, pass the earlier "
                    "layer's again"
                )
            self._check_new(queries)
            return self_attend(queries, keys, values, rotary=rotary, **sight), self
        if keys is not None and values is not None:
            cache = append(cache, layer, keys, values, rotary=rotary)
        output = attend(queries, cache, layer, rotary=rotary, **sight)
        return output, replace(self, cache=_between_layers(cache))

    @automatic_axes
    def done(self) -> KVCache | None:
        """End the call.

        Returns:
          The cache, whose lengths include the new tokens; None without a cache.

        Raises:
          ValueError: if no keys and values were appended to a layer.
        """
        return None if self.cache is None else advance(self.cache, self.new)

    def _check_new(self, queries: Queries) -> None:
        if queries.ndim == 4 and queries.shape[2] != self.new:
            raise ValueError(
                f"queries of {queries.shape[2]} token(s), but the call began with {self.new}"
            )


def _between_layers(cache: KVCache) -> KVCache:
    """Return the cache in the form that a scan over stacked layers carries: without the raw tokens
    of a long call, which only the queries of the layer appended last may see."""
    if cache.stacks is None:
        return cache
    layers = tuple(replace(layer, strip=None, strip_of=None) for layer in cache.layers)
    return replace(cache, layers=layers)


@automatic_axes
def step(cache: KVCache | None, tokens: ArrayLike, *, lengths: Counts | None = None) -> Step:
    """Begin one call (forward pass) of a model. Pass the result from layer to layer::

        call = kvjax.step(cache, tokens, lengths=lengths)
        output, call = call.attend(layer, queries, keys, values, rotary=table)
        ...                                                    # the other layers
        cache = call.done()

    Args:
      cache: the cache. Donate it to write in place. With None, tokens attend without a cache: each
        sees itself and the tokens before it in the call.
      tokens: an array [batch, new, ...], or the number ``new``. Only the array's shape is used.
      lengths: int32[batch], the number of real tokens per row, by default ``new``. Without a cache
        it is not used, because no token sees the padding after it.

    Raises:
      ValueError: if ``cache`` is not a cache or has an unfinished call, if ``tokens`` does not have
        the cache's batch size, or if ``lengths`` is wrong (see ``kvjax.append``).

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      queries = jnp.ones((1, 4, 3, 64))
      keys = values = jnp.ones((1, 2, 3, 64))
      call = kvjax.step(cache, 3)
      for layer in range(lm.config.num_hidden_layers):
          output, call = call.attend(layer, queries, keys, values)
      cache = call.done()
      ```
    """
    shape = jnp.shape(tokens)
    if len(shape) == 1:
        raise ArgumentError(
            f"tokens must have the shape [batch, new, ...], or be a number, got {list(shape)}",
            param="tokens",
        )
    new = as_int("tokens", tokens, 1) if not shape else as_int("new", shape[1], 1)
    if cache is None:
        return Step(None, new)
    cache = validated("kvjax.step", cache)
    if shape and shape[0] != cache.batch:
        raise ValueError(f"tokens have {shape[0]} row(s), but the cache has {cache.batch}")
    if cache.mesh_sharding is not None:
        cache.mesh_sharding.check_context()
    return Step(begin_append(cache, new, lengths), new)
