"""The tokens of each row so far, for penalties and hooks."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.sampling.filters import Logits, Seen, with_set

LogitsHook = Callable[[Logits, Int[Array, "batch room"], PerRow], Logits]
"""A user's own change of the logits: of float32[batch, vocab], each row's tokens so far,
int32[batch, room], and how many they are, int32[batch]. Pure, and traced once for a program."""


@pytree_dataclass
class Past:
    """``seen``: which tokens stand in a row, for the repetition penalty; ``tokens``: all of them,
    int32[batch, room], and ``length``, how many, int32[batch], for a hook, counts of tokens and
    their runs; None where that is not asked for."""

    seen: Seen | None = None
    tokens: Array | None = None
    length: PerRow | None = None

    def hooked(self, logits: Logits, hook: LogitsHook | None) -> Logits:
        """Logits as a hook changes them; what it sets to minus infinity is not drawn.

        Raises:
          ValueError: if it gives something else.
        """
        if hook is None:
            return logits
        assert self.tokens is not None and self.length is not None
        found: Any = hook(logits.astype(jnp.float32), self.tokens, self.length)
        shape, dtype = getattr(found, "shape", None), getattr(found, "dtype", np.dtype(object))
        if shape != logits.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"logits_hook must give logits [batch={logits.shape[0]}, vocab={logits.shape[1]}], "
                f"and gave {dtype}{list(shape or ())}"
            )
        return found

    def with_token(self, seen: Seen | None, token: PerRow, taken: RowMask) -> "Past":
        """With a token more of the rows that took one; ``seen``: with it already."""
        if self.tokens is None or self.length is None:
            return Past(seen)
        at = jnp.where(taken, self.length, self.tokens.shape[1])
        return Past(seen, with_set(self.tokens, at, token), self.length + taken.astype(jnp.int32))


def past_of(
    texts: list[list[int]], *, vocab: int, room: int, marks: bool, whole: bool
) -> Past | None:
    """Of rows' texts so far, as NumPy's arrays: ``marks`` of the tokens in them, and the ``whole``
    of them, each if it is asked for. ``room``: tokens that a row may come to."""
    if not marks and not whole:
        return None
    seen: Any = None
    if marks:
        seen = np.zeros((len(texts), vocab), bool)
        for row, ids in enumerate(texts):
            seen[row, ids] = True
    if not whole:
        return Past(seen)
    tokens: Any = np.zeros((len(texts), room), np.int32)
    for row, ids in enumerate(texts):
        tokens[row, : len(ids)] = ids
    length: Any = np.array([len(ids) for ids in texts], np.int32)
    return Past(seen, tokens, length)
