"""The sequence so far, in the form that programs continue from: a cache, or all tokens."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.generation.model import Model
from kvjax.operations.rows import rewind
from kvjax.sampling.filters import Logits


@pytree_dataclass
class Cached:
    """The text so far, as a cache."""

    cache: KVCache

    def forward(
        self, model: Model, params: Any, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Cached"]:
        """Append each row's first ``lengths`` tokens; the logits after the last of them."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths, last_only=True)
        return logits[:, 0], Cached(cache)

    def forward_all(
        self, model: Model, params: Any, tokens: Tokens, lengths: PerRow
    ) -> tuple[Float[Array, "batch new vocab"], "Cached"]:
        """The same, with the logits behind every token."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths)
        return logits, Cached(cache)

    def rewind(self, tokens: PerRow) -> "Cached":
        """Without so many of each row's newest tokens."""
        return Cached(rewind(self.cache, tokens))


@pytree_dataclass
class Uncached:
    """The text so far, as tokens, all of which every step computes again.

    ``tokens``: int32[batch, capacity]; ``length``: int32[batch]; ``rotary_len``: the length that
    rotary frequencies go by, None for the capacity.
    """

    tokens: Array
    length: Array
    rotary_len: int | None = static_field(default=None)

    @property
    def cache(self) -> None:
        """There is none."""

    def forward(
        self, model: Model, params: Any, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Uncached"]:
        """Append each row's first ``lengths`` tokens; the logits after the last of them."""
        capacity = self.tokens.shape[1]
        index = arange_row(capacity) - self.length[:, None]
        new = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
        text = jnp.where((index >= 0) & (index < lengths[:, None]), new, self.tokens)
        length = self.length + lengths
        reach = self.rotary_len or capacity
        logits = model.apply(params, text, lengths=length, last_only=True, max_len=reach)
        return logits[:, 0], Uncached(text, length, self.rotary_len)


Context = Cached | Uncached
