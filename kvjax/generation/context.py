"""The sequence that programs continue: a cache, or all tokens without a cache."""

import jax.numpy as jnp
from jaxtyping import Float, PyTree

from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.generation.model import Model
from kvjax.operations.rows import rewind
from kvjax.sampling.filters import Logits


@pytree_dataclass
class Cached:
    """A sequence in a cache."""

    cache: KVCache

    def forward(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Cached"]:
        """Append each row's first ``lengths`` tokens, and return the logits after the last one."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths, last_only=True)
        return logits[:, 0], Cached(cache)

    def forward_all(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Float[Array, "batch new vocab"], "Cached"]:
        """As ``forward``, with the logits after every token."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths)
        return logits, Cached(cache)

    def rewind(self, tokens: PerRow) -> "Cached":
        """Remove each row's newest ``tokens``."""
        return Cached(rewind(self.cache, tokens))


@pytree_dataclass
class Uncached:
    """A sequence without a cache. Every step processes all its tokens again.

    Attributes:
      tokens: int32[batch, capacity].
      length: int32[batch].
      rotary_len: the length that rotary frequencies are computed for; None for the capacity.
    """

    tokens: Array
    length: Array
    rotary_len: int | None = static_field(default=None)

    @property
    def cache(self) -> None:
        """None."""

    def forward(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Uncached"]:
        """Append each row's first ``lengths`` tokens, and return the logits after the last one."""
        capacity = self.tokens.shape[1]
        index = arange_row(capacity) - self.length[:, None]
        new = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
        tokens = jnp.where((index >= 0) & (index < lengths[:, None]), new, self.tokens)
        length = self.length + lengths
        max_len = self.rotary_len or capacity
        logits = model.apply(params, tokens, lengths=length, last_only=True, max_len=max_len)
        return logits[:, 0], Uncached(tokens, length, self.rotary_len)


Context = Cached | Uncached
