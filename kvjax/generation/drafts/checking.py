"""A draft against the model's own tokens, place by place, inside a program."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, UInt

from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.context import Cached
from kvjax.generation.drafts.proposals import Drafted
from kvjax.generation.programs import Progress, gather_vocab
from kvjax.sampling.filters import set_at
from kvjax.sampling.history import TokenHistory

Chosen = tuple[Progress, TokenHistory, Any]
"""As ``choosing.chosen`` gives it."""
EveryLogits = Float[Array, "batch places vocab"]
Choose = Callable[..., Chosen]
"""``(progress, past, logits, allowed=)``."""


def checked(
    drafted: Drafted, logits: EveryLogits, context: Cached, before: Progress, past: TokenHistory,
    now: RowMask, out: Any, begin: PerRow, choose: Choose,
    allowed: UInt[Array, "batch places words"] | None = None,
) -> tuple[Progress, TokenHistory, Any]:  # fmt: skip
    """The model's own tokens of the rows that it is ``now`` for, as far as they are what was
    drafted, and one more of each.

    Args:
      logits: behind the newest token, and behind each that was drafted.
      out: a row's tokens and scores, into which they are written from count ``begin`` on.
      allowed: bits of what may stand at each place, see ``sample``.
    """
    tokens, count = drafted

    def go_on(carry: Any) -> Array:
        place, _, _, still, _ = carry
        return (place <= tokens.shape[1]) & jnp.any(still)

    def one(carry: Any) -> Any:
        place, progress, past, still, out = carry
        here = gather_vocab(
            lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False), context
        )
        may = None
        if allowed is not None:
            may = lax.dynamic_index_in_dim(allowed, place, axis=1, keepdims=False)
        after, past, found = choose(replace(progress, done=~still), past, here, allowed=may)
        after = replace(after, done=jnp.where(still, after.done, progress.done))
        out = told(out, (after.token, found), progress, after, begin)
        guess = jnp.take(tokens, place, axis=1, mode="clip")
        still &= (place < count) & (after.token == guess) & ~after.done
        return place + 1, after, past, still, out

    carry = jnp.int32(0), before, past, now, out
    _, after, past, _, out = lax.while_loop(go_on, one, carry)
    return after, past, out


def told(out: Any, found: Any, before: Progress, after: Progress, begin: PerRow) -> Any:
    """With what was found of the rows that took a token: [batch] each, into [batch, room]."""
    room = jax.tree.leaves(out)[0].shape[1]
    at = jnp.where(after.count > before.count, before.count - begin, room)
    return jax.tree.map(lambda all, new: set_at(all, at, new), out, found)
