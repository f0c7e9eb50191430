"""The next token of each row, chosen from its logits, and where the rows stand with it."""

import jax.numpy as jnp
from jax import lax

from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.contexts import Context
from kvjax.sampling.controls import Filters, Sampling
from kvjax.sampling.filters import Allowed, Logits, with_set
from kvjax.sampling.past import Past
from kvjax.sampling.sampler import filter_logits, sample
from kvjax.sampling.scores import Scores, scores_of


@state
class Progress:
    """Where each row stands.

    ``token``: the newest, which the model has not seen yet; ``count``: new tokens; ``done``,
    ``broken``: finished, and finished because its logits were not finite numbers.
    """

    token: PerRow
    count: PerRow
    done: RowMask
    broken: RowMask


def chosen(
    before: Progress, past: Past | None, logits: Logits, filters: Filters, settings: Sampling,
    limit: Array, scores: int | None, *, allowed: Allowed | None = None,
) -> tuple[Progress, Past | None, Scores | None]:  # fmt: skip
    """The next token of the rows that are not done, their texts with it, and its scores;
    ``allowed``: see ``sample``."""
    raw = logits
    if past is not None:
        logits = past.hooked(logits, filters.hook)
    after, then = choose(before, past, logits, filters, settings, limit, allowed=allowed)
    found = None
    if scores is not None:
        filtered = None
        if not filters.greedy:
            filtered = filter_logits(
                logits.astype(jnp.float32), filters, settings, count=before.count, past=past,
                allowed=allowed,
            )  # fmt: skip
        found = scores_of(
            raw, after.token, scores, filtered=filtered, temperature=settings.temperature
        )
    return after, then, found


def whole(logits: Logits, context: Context) -> Logits:
    """Logits with the whole vocabulary of its rows on every device of a cache's mesh: drawing looks
    at them many times, and programs should not depend on how they were divided."""
    spread = None if context.cache is None else context.cache.spread
    if spread is None:
        return logits
    return lax.with_sharding_constraint(logits, spread.sharding(spread.of_rows()))


def choose(
    progress: Progress,
    past: Past | None,
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    limit: Array,
    *,
    forced: PerRow | None = None,
    allowed: Allowed | None = None,
) -> tuple[Progress, Past | None]:
    """Choose the next token of the rows that are not done, and their texts with it.

    ``limit``: of all rows, or of each. ``forced``: int32[batch], tokens that are known already, -1
    for none. ``allowed``: see ``sample``.
    """
    token, finite = sample(
        logits, filters, settings, count=progress.count, past=past, allowed=allowed
    )
    if forced is not None:
        token = jnp.where(forced >= 0, forced, token)
    broken = progress.broken | (~progress.done & ~finite)
    taken = ~progress.done & finite
    token = jnp.where(taken, token, progress.token)
    count = progress.count + taken.astype(jnp.int32)
    ended = taken & jnp.any(token[:, None] == settings.eos, axis=-1)
    done = progress.done | broken | ended | (count >= limit)
    if past is not None:
        seen = past.seen
        if seen is not None:
            seen = with_set(seen, jnp.where(taken, token, seen.shape[1]), True)
        past = past.with_token(seen, token, taken)
    return Progress(token, count, done, broken), past
