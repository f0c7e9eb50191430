"""A step of a beam search, on arrays: from what beams are worth to those that go on.

A beam is a row of the cache. Beams that go on from one that has several stand where there is room:
the first of them stays in its row, the others take those of beams that nothing goes on from.

Source: Transformers' ``_beam_search``; of groups, Vijayakumar et al., "Diverse Beam Search",
arXiv:1610.02424, with the Hamming distance.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array
from kvjax.generation.beams.config import BeamConfig
from kvjax.sampling.scores import Scores


@pytree_dataclass
class SearchParams:
    """Of a search, traced: see ``Search``."""

    length_penalty: Array
    early_stopping: Array
    diversity_penalty: Array


@pytree_dataclass
class Hypotheses:
    """The best texts of a prompt that have ended, [batch, beams] each, those of a group in falling
    order: ``score``, minus infinity where there is none; ``length``, its tokens; ``token``, the
    last one; ``beam``, the one that it went on from; ``told``, the last token's scores."""

    score: Array
    length: Array
    token: Array
    beam: Array
    token_scores: Scores | None


@pytree_dataclass
class SearchState:
    """Where a search stands: ``token`` and ``score``, [batch, beams], the newest token of each beam
    and the sum of its tokens' log-probabilities, minus infinity for a beam that there is not;
    ``count``, ``done``: [batch, groups], tokens so far, and groups that are at their end;
    ``broken``: bool[batch], prompts whose logits were not finite numbers; ``ended``.
    ``since``: int32[batch, beams], tokens that the rows had when the search began."""

    token: Array
    score: Array
    count: Array
    done: Array
    broken: Array
    ended: Hypotheses
    since: Array


class BeamChoice(NamedTuple):
    """Of a step, [batch, beams] each: the beam that each goes on from, and its token's scores."""

    parent: Array
    token_scores: Scores | None


def initial_state(asked: Array, since: Array, beams: BeamConfig, scores: int | None) -> SearchState:
    """A search that has not chosen anything: a beam of each group is there. ``asked``:
    bool[batch], the prompts that are any; ``scores``: as of ``programs.decode``."""
    shape = len(asked), beams.num_beams
    zeros, none = jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
    first = jnp.arange(beams.num_beams, dtype=jnp.int32) % beams.group_size == 0
    count = jnp.zeros((len(asked), beams.num_groups), jnp.int32)
    done = jnp.broadcast_to(~asked[:, None], count.shape)
    told = None if scores is None else Scores.zeros(shape, scores)
    ended = Hypotheses(none, zeros, zeros, zeros, told)
    score = jnp.where(first[None], 0.0, none)
    return SearchState(zeros, score, count, done, asked & False, ended, since.reshape(shape))


def advance(
    before: SearchState,
    known: Array,
    own: Array,
    eos: Array,
    numbers: SearchParams,
    limit: Array,
    beams: BeamConfig,
    scores: int | None,
) -> tuple[SearchState, BeamChoice]:
    """A token more of every beam of the groups that are not done.

    Args:
      known: float32[batch, beams, vocab], log-probabilities, with what penalties made of them.
      own: the same without; for the ``scores``.
      eos: int32[batch, n], tokens that end a text, padded with such as are none.
      limit: int32[], tokens after which a text ends.
    """
    batch, _, vocab = known.shape
    raw = None if scores is None else (own, *(lax.top_k(own, scores) if scores else ()))
    counts, found = jnp.zeros((batch, vocab), jnp.float32), []
    for group in range(beams.num_groups):
        first = group * beams.group_size
        here = slice(first, first + beams.group_size)
        mine = known[:, here]
        if group:
            mine = mine - numbers.diversity_penalty * counts[:, None]
        each: Any = before.token, before.score, before.ended, raw
        each = jax.tree.map(lambda x, here=here: x[:, here], each)
        step: Any = functools.partial(_group, numbers=numbers, limit=limit, first=first)
        of_groups = before.count[:, group], before.done[:, group]
        found.append(jax.vmap(step)(mine, *each, *of_groups, eos))
        if beams.num_groups > 1:
            token, score = found[-1][:2]
            real = (score > -jnp.inf) & ~before.done[:, group, None]
            at = jnp.where(real, token, vocab)
            counts = counts.at[jnp.arange(batch, dtype=jnp.int32)[:, None], at].add(
                1.0, mode="drop"
            )
    *rows, count, done = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *found)
    token, score, ended, chosen = jax.tree.map(
        lambda x: x.reshape(batch, beams.num_beams, *x.shape[3:]), tuple(rows)
    )
    broken = before.broken | (jnp.all(score == -jnp.inf, 1) & jnp.all(ended.score == -jnp.inf, 1))
    broken &= jnp.any(~before.done, axis=1)
    after = replace(before, token=token, score=score, ended=ended, count=count, done=done)
    return replace(after, broken=before.broken | broken), chosen


def _group(
    known: Array,
    token: Array,
    score: Array,
    ended: Hypotheses,
    raw: Any,
    count: Array,
    done: Array,
    eos: Array,
    *,
    numbers: SearchParams,
    limit: Array,
    first: int,
) -> Any:
    """``extended`` of one group, whose beams are numbered from ``first`` on: token and score of
    each beam, what has ended, what was chosen, count, and whether it is done."""
    width, length = len(score), count + 1
    last = length >= limit
    going, ends = _continuations(known, score, eos)
    # Of all continuations the best, of which those that end are kept.
    best = jax.tree.map(lambda *x: jnp.concatenate(x), going, ends)
    order = jnp.lexsort((best.beam * known.shape[1] + best.token, -best.score))[:width]
    best = jax.tree.map(lambda x: x[order], best)
    value = best.score / length.astype(jnp.float32) ** numbers.length_penalty
    stays = (best.ends | last) & ~done & (best.score > -jnp.inf)
    told = _told(raw, best.beam, best.token)
    new = Hypotheses(
        jnp.where(stays, value, -jnp.inf),
        jnp.full(width, length, jnp.int32),
        best.token,
        best.beam + first,
        told,
    )
    every = jax.tree.map(lambda *x: jnp.concatenate(x), ended, new)
    _, at = lax.top_k(every.score, width)
    ended = jax.tree.map(lambda x: x[at], every)

    child, parent = _in_rows(going)
    full = jnp.all(ended.score > -jnp.inf)
    to = jnp.where((numbers.early_stopping == 2) & (numbers.length_penalty > 0), limit, length)
    hoped = jnp.max(going.score) / to.astype(jnp.float32) ** numbers.length_penalty
    worst = jnp.where(full, jnp.min(ended.score), -jnp.inf)
    over = last | ~(hoped > worst) | (full & (numbers.early_stopping == 1))
    chosen = BeamChoice(
        jnp.where(done, jnp.arange(width, dtype=jnp.int32), parent) + first,
        _told(raw, going.beam[child], going.token[child]),
    )
    return (
        jnp.where(done, token, going.token[child]),
        jnp.where(done, score, going.score[child]),
        ended,
        chosen,
        jnp.where(done, count, length),
        done | over,
    )


def _told(raw: Any, beam: Array, token: Array) -> Scores | None:
    """The scores of tokens of beams, int32[n] each."""
    if raw is None:
        return None
    own, *likeliest = raw
    chosen = own[beam, token]
    if not likeliest:
        none = (jnp.zeros((len(beam), 0), x) for x in (jnp.int32, jnp.float32))
        return Scores(chosen, jnp.zeros_like(chosen), *none)
    known, ids = (x[beam] for x in likeliest)
    return Scores(chosen, jnp.zeros_like(chosen), ids.astype(jnp.int32), known)


class _Candidates(NamedTuple):
    """Continuations, [n] each."""

    score: Array
    token: Array
    beam: Array
    ends: Array


def _continuations(known: Array, score: Array, eos: Array) -> tuple[_Candidates, _Candidates]:
    """Of a group's beams the best that go on, as many as beams and falling, and all that end."""
    width, vocab = known.shape
    total = known + score[:, None]
    best, token = lax.top_k(total.at[:, eos].set(-jnp.inf, mode="drop"), min(width, vocab))
    each = best.shape[1]
    best, at = lax.top_k(best.ravel(), width)
    at = at.astype(jnp.int32)
    going = _Candidates(best, token.ravel()[at], at // each, jnp.zeros(width, bool))
    order = jnp.arange(len(eos), dtype=jnp.int32)
    again = jnp.any((eos[:, None] == eos[None]) & (order[None] < order[:, None]), axis=1)
    ids = jnp.minimum(eos, vocab - 1)
    end = jnp.where((again | (eos >= vocab))[None], -jnp.inf, total[:, ids])
    beam = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[:, None], end.shape)
    ends = end, jnp.broadcast_to(ids[None], end.shape), beam, jnp.ones(end.shape, bool)
    return going, _Candidates(*(x.ravel() for x in ends))


def _in_rows(going: _Candidates) -> tuple[Array, Array]:
    """Which continuation each row has, int32[width], and which row it goes on from: its own, where
    anything goes on from it."""
    rows = jnp.arange(len(going.score), dtype=jnp.int32)
    real, beam = going.score > -jnp.inf, going.beam
    same = (beam[:, None] == beam[None]) & real[None]
    stays = real & ~jnp.any(same & (rows[None] < rows[:, None]), axis=1)
    here = beam[None] == rows[:, None]
    taken = jnp.any(stays[None] & here, axis=1)
    free, moved = (jnp.cumsum(~x, dtype=jnp.int32) for x in (taken, stays))
    there = jnp.where(stays[None], here, ~taken[:, None] & (free[:, None] == moved[None]))
    child = lax.argmax(there, 1, jnp.int32)
    return child, jnp.where(real[child], beam[child], rows)
