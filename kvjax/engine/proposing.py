"""What a draft's model proposes for rows of an engine."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.engine.calls import Held
from kvjax.engine.checking import Drafted
from kvjax.engine.programs import context_of, some_of, with_some, written_to
from kvjax.generation.drafts.proposals import Second
from kvjax.generation.programs import Progress, choose
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import Past


@state
class Wanted:
    """What the rows of a ``Drafted`` want of the draft's model.

    ``count``: int32[n], tokens of each, 0 for none; ``known``: int32[n], those of its text that the
    draft's cache holds; ``begun``: int32[n], new tokens that it has; ``tables``: of the draft's
    kinds of layers, int32[n, columns].
    """

    count: PerRow
    known: PerRow
    begun: PerRow
    tables: tuple[Array, ...]


@functools.partial(jax.jit, static_argnames="drafter", donate_argnames="held")
def propose(
    held: Held, drafter: Second, params: Any, past: Past, drafted: Drafted, wanted: Wanted
) -> tuple[Held, tuple[Tokens, PerRow]]:
    """The tokens and counts of ``drafted``, with what the draft's model would write.

    ``held``: of its own rows; ``past``: the texts of all of the engine's rows, whole where they
    want something. What the draft reads of these is then in its cache, and what it proposes, but
    for the newest.
    """
    before, some = some_of(held, drafted.rows), wanted.count > 0
    cache, settings = before.cache, drafted.asked.sampling
    if len(drafted.rows) < held.cache.batch:
        past = jax.tree.map(lambda x: jnp.take(x, drafted.rows, axis=0, mode="clip"), past)
    assert past.length is not None
    fresh = some & (wanted.known == 0)
    cache = replace(cache, written=jnp.where(fresh[:, None], 0, cache.written))
    ends = jnp.where(some, past.length + wanted.count - 1, 0)
    lengths = jnp.where(some, wanted.known, 0)
    context = context_of(cache, lengths, wanted.tables, written=written_to(cache, ends))
    filters = replace(settings.filters, mesh=cache.spread is not None)

    def one(progress: Progress, past: Past, logits: Logits, limit: PerRow) -> tuple[Progress, Past]:
        found: Any = choose(progress, past, logits, filters, settings, limit)
        return found

    newest: Any = drafted.tokens[:, 0]
    progress = Progress(newest, wanted.begun, ~some, some & ~some)
    (tokens, count), context = drafter.propose(params, context, progress, past, wanted.count, one)
    tokens = jnp.where(some[:, None], tokens, drafted.tokens[:, 1:])
    tokens = jnp.concatenate([drafted.tokens[:, :1], tokens], axis=1)
    after = Held(context.cache, before.progress, before.past)
    # One at least, whatever it is: a row's own token is chosen by the check.
    found = tokens, jnp.where(some, jnp.maximum(count, 1), drafted.count)
    return with_some(held, drafted.rows, after), found
