"""The tokens of each row, for penalties and hooks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.sampling.filters import Logits, Seen, set_at

LogitsHook = Callable[[Logits, Int[Array, "batch room"], PerRow], Logits]
"""A user's function that changes logits. It receives the logits, float32[batch, vocab], the tokens
of each row, int32[batch, room], and the number of tokens of each row, int32[batch]. It returns
logits. It must be pure, and is traced once for every program."""


@pytree_dataclass
class TokenHistory:
    """The prompt and the new tokens of each row. Attributes that no enabled sampling step needs are
    None.

    Attributes:
      seen: bool[batch, vocab], whether a row contains a token, for the repetition penalty.
      tokens: int32[batch, room], all tokens of each row, for hooks, counts and n-grams.
      length: int32[batch], how many of ``tokens`` are real.
    """

    seen: Seen | None = None
    tokens: Array | None = None
    length: PerRow | None = None

    def apply_hook(self, logits: Logits, hook: LogitsHook | None) -> Logits:
        """Apply a hook to logits. Tokens that the hook sets to minus infinity are not drawn.

        Raises:
          ValueError: if the hook does not return logits of the same shape.
        """
        if hook is None:
            return logits
        assert self.tokens is not None and self.length is not None
        changed: Any = hook(logits.astype(jnp.float32), self.tokens, self.length)
        shape, dtype = getattr(changed, "shape", None), getattr(changed, "dtype", np.dtype(object))
        if shape != logits.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"logits_hook must return logits [batch={logits.shape[0]}, "
                f"vocab={logits.shape[1]}], got {dtype}{list(shape or ())}"
            )
        return changed

    def append_tokens(self, seen: Seen | None, token: PerRow, taken: RowMask) -> "TokenHistory":
        """Append ``token`` to the rows where ``taken`` is true. ``seen`` must already include
        it."""
        if self.tokens is None or self.length is None:
            return TokenHistory(seen)
        at = jnp.where(taken, self.length, self.tokens.shape[1])
        return TokenHistory(
            seen, set_at(self.tokens, at, token), self.length + taken.astype(jnp.int32)
        )


def make_history(
    rows: list[list[int]], *, vocab: int, width: int, seen: bool, tokens: bool
) -> TokenHistory | None:
    """Make the history of rows, as NumPy arrays; None if nothing is needed.

    Args:
      rows: the tokens of each row.
      vocab: the size of the vocabulary.
      width: the maximum number of tokens of a row.
      seen: whether to include ``TokenHistory.seen``.
      tokens: whether to include ``TokenHistory.tokens`` and ``TokenHistory.length``.
    """
    if not seen and not tokens:
        return None
    marks: Any = None
    if seen:
        marks = np.zeros((len(rows), vocab), bool)
        for row, ids in enumerate(rows):
            marks[row, ids] = True
    if not tokens:
        return TokenHistory(marks)
    padded: Any = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    lengths: Any = np.array([len(ids) for ids in rows], np.int32)
    return TokenHistory(marks, padded, lengths)
