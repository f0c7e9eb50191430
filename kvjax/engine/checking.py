"""A request's draft, checked in one pass: see ``kvjax.generation.drafts.speculation``."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt

from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.engine.calls import Asked, Held, Report
from kvjax.engine.programs import choose_next, context_of, report_of, some_of, with_some, written_to
from kvjax.generation.model import Model
from kvjax.sampling.scores import MOST_SCORES, Scores


@state
class Drafted:
    """Drafts of some rows.

    ``rows``: int32[n], which; ``tokens``: int32[n, 1 + most], each row's newest token, and behind
    it ``count`` drafted ones, int32[n]; ``starts``: int32[n], tokens that each has in the cache;
    ``tables``: of each kind of layers, int32[n, columns]. ``allowed``:
    bits of what may come behind each token.
    """

    rows: PerRow
    tokens: Tokens
    count: PerRow
    starts: PerRow
    tables: tuple[Array, ...]
    allowed: UInt[Array, "rows places words"]
    asked: Asked


@functools.partial(jax.jit, static_argnames="model", donate_argnames="held")
def check(held: Held, model: Model, params: Any, drafted: Drafted) -> tuple[Held, Report]:
    """Feed drafts, and choose a row's tokens as far as they are what was drafted, and one more.
    What was not taken stays behind the row's end: the next program writes over it."""
    before, (rows, wide) = some_of(held, drafted.rows), drafted.tokens.shape
    fed = jnp.where(before.progress.done | (drafted.count == 0), 0, 1 + drafted.count)
    lengths = jnp.where(fed > 0, drafted.starts, 0)
    written = written_to(before.cache, lengths + fed)
    context: Any = context_of(before.cache, lengths, drafted.tables, written=written)
    logits, context = context.feed_all(model, params, drafted.tokens, fed)
    guesses = jnp.pad(drafted.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    out = jnp.zeros((rows, wide), jnp.int32), Scores.zeros((rows, wide), MOST_SCORES)

    def go_on(carry: Any) -> Array:
        place, still, *_ = carry
        return (place < wide) & jnp.any(still)

    def one(carry: Any) -> Any:
        place, still, progress, past, out = carry
        here = lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False)
        waiting = replace(progress, done=~still)
        allowed = lax.dynamic_index_in_dim(drafted.allowed, place, axis=1, keepdims=False)
        after, past, scores = choose_next(
            waiting, past, here, context, drafted.asked, -jnp.ones_like(fed), allowed
        )
        after = replace(after, done=jnp.where(still, after.done, progress.done))
        out = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], place, axis=1),
            out, (after.token, scores),
        )  # fmt: skip
        guess = lax.dynamic_index_in_dim(guesses, place, axis=1, keepdims=False)
        still &= (place < drafted.count) & (after.token == guess) & ~after.done
        return place + 1, still, after, past, out

    carry = jnp.int32(0), fed > 0, before.progress, before.past, out
    _, _, progress, past, (tokens, scores) = lax.while_loop(go_on, one, carry)
    after = Held(context.cache, progress, past)
    return with_some(held, drafted.rows, after), report_of(after, tokens, scores)
