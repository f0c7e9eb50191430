"""The options of a beam search, and one step of it: from log-probabilities to the next beams.

A beam is a row of the cache. If several new beams continue the same beam, the first of them keeps
that beam's row. The others take the rows of beams that no new beam continues.

Source: ``_beam_search`` of Transformers; for groups, Vijayakumar et al., "Diverse Beam Search",
arXiv:1610.02424, with Hamming diversity.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, as_int, as_python, short_repr
from kvjax.generation.options import GenerationOptions
from kvjax.sampling.scores import Scores

MAX_ROWS = 65536
"""The maximum number of rows per prompt. The host keeps a sequence for each row."""
_EARLY_STOPPING: dict[bool | str, int] = {False: 0, True: 1, "never": 2}


@dataclass(frozen=True)
class BeamConfig:
    """The number of beams of each prompt, and the number of groups that they form. This is a static
    argument of programs."""

    num_beams: int
    num_groups: int = 1

    @property
    def group_size(self) -> int:
        """The number of beams of a group."""
        return self.num_beams // self.num_groups


@dataclass(frozen=True)
class SearchConfig:
    """The settings of a beam search or, if ``beams`` is None, of choosing the best of several
    samples.

    Attributes:
      num_return: the number of sequences that are returned for each prompt.
      beams: the numbers of beams and groups; None for samples.
      length_penalty: scores are divided by the length to the power ``length_penalty``.
      early_stopping: when a group ends after it has found as many finished sequences as beams. With
        1 immediately, with 0 when no better sequence is likely, with 2 when none is possible.
      diversity_penalty: the penalty for tokens that other groups have chosen in the same step.
    """

    num_return: int
    beams: BeamConfig | None = None
    length_penalty: float = 1.0
    early_stopping: int = 0
    diversity_penalty: float = 0.0


def resolve_search(options: GenerationOptions) -> tuple[int, SearchConfig | None]:
    """Return the number of rows of each prompt, and the settings of the search; None for plain
    samples.

    Raises:
      ValueError: if options are out of range, or can't be combined.
    """
    n = as_int("n", options.n, 1, MAX_ROWS)
    beams = as_int("num_beams", options.num_beams, 1, MAX_ROWS)
    if beams > 1:
        return beams, _beam_search(options, n, beams)
    defaults = GenerationOptions()
    for name in ("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"):
        value = as_python(getattr(options, name))
        is_default = isinstance(value, bool | int | float | str) and value == getattr(
            defaults, name
        )
        if not is_default:
            message = (
                f"{name} is {short_repr(value)}, but num_beams is 1; it needs a beam search, for "
                "example num_beams=4"
            )
            raise ArgumentError(message, param=name)
    if options.best_of is None:
        return n, None
    samples = as_int("best_of", options.best_of, 1, MAX_ROWS)
    if samples < n:
        message = f"best_of is {samples}, but must be at least n={n}"
        raise ArgumentError(message, param="best_of")
    return samples, SearchConfig(n)


def _beam_search(options: GenerationOptions, n: int, beams: int) -> SearchConfig:
    groups = as_int("num_beam_groups", options.num_beam_groups, 1)
    if n > beams:
        message = f"n is {n}, but num_beams={beams} finds only {beams} sequences"
        raise ArgumentError(message, param="n")
    if options.best_of is not None:
        message = "best_of can't be combined with num_beams; give one of them"
        raise ArgumentError(message, param="best_of")
    if beams % groups:
        message = f"num_beam_groups is {groups}, but must divide num_beams={beams}"
        raise ArgumentError(message, param="num_beam_groups")
    temperature = as_python(options.temperature)
    if temperature != 0:
        message = (
            f"temperature is {short_repr(temperature)}, but a beam search does not sample; omit "
            "temperature or num_beams"
        )
        raise ArgumentError(message, param="temperature")
    if options.draft is not None:
        message = "a draft was given together with num_beams; give one of them"
        raise ArgumentError(message, param="draft")
    if options.stop:
        message = (
            "a beam search can't use stop strings, which are searched for on the host; use "
            "eos_token_ids"
        )
        raise ArgumentError(message, param="stop")
    early = as_python(options.early_stopping)
    if not isinstance(early, bool | str) or early not in _EARLY_STOPPING:
        message = f"early_stopping is {short_repr(early)}, but must be False, True or 'never'"
        raise ArgumentError(message, param="early_stopping")
    penalty = _number("length_penalty", options.length_penalty, 7)
    diversity = _number("diversity_penalty", options.diversity_penalty, 10**6)
    if diversity < 0 or (diversity > 0) != (groups > 1):
        message = (
            f"diversity_penalty is {diversity} with num_beam_groups={groups}; it must be above 0 "
            "for several groups, which would otherwise be equal, and 0 for one"
        )
        raise ArgumentError(message, param="diversity_penalty")
    return SearchConfig(n, BeamConfig(beams, groups), penalty, _EARLY_STOPPING[early], diversity)


def _number(name: str, value: object, limit: int) -> float:
    # Outside of these limits, a score is not finite in float32.
    value = as_python(value)
    numeric = isinstance(value, int | float)
    if isinstance(value, bool) or not numeric or not math.isfinite(value) or abs(value) > limit:
        message = f"{name} must be a number from {-limit} to {limit}, got {short_repr(value)}"
        raise ArgumentError(message, param=name)
    return float(value)


@pytree_dataclass
class SearchParams:
    """The numeric settings of a ``SearchConfig``, as traced arguments."""

    length_penalty: Array
    early_stopping: Array
    diversity_penalty: Array


@pytree_dataclass
class Hypotheses:
    """The best finished sequences of each prompt, the best of each group first.

    All arrays are [batch, beams]. ``score`` is -inf for an empty entry. ``length`` is the number of
    tokens. ``token`` is the last token, ``beam`` the beam that it continues, and ``token_scores``
    its scores.
    """

    score: Array
    length: Array
    token: Array
    beam: Array
    token_scores: Scores | None


@pytree_dataclass
class SearchState:
    """The state of a beam search.

    Attributes:
      token: int32[batch, beams], the newest token of each beam.
      score: float32[batch, beams], the sum of the log-probabilities of a beam's tokens; -inf for a
        beam that does not exist.
      count: int32[batch, groups], the number of new tokens.
      done: bool[batch, groups], whether the group has ended.
      broken: bool[batch], whether the prompt has logits that are not finite.
      finished: the finished sequences.
      start: int32[batch, beams], the number of tokens in each row when the search began.
    """

    token: Array
    score: Array
    count: Array
    done: Array
    broken: Array
    finished: Hypotheses
    start: Array


class BeamChoice(NamedTuple):
    """The choice of a step: the beam that each new beam continues, and the scores of its token.
    Both are [batch, beams]."""

    parent: Array
    token_scores: Scores | None


def initial_state(real: Array, start: Array, beams: BeamConfig, scores: int | None) -> SearchState:
    """Create the state of a search before its first step. It has one beam in each group.

    Args:
      real: bool[batch], False for prompts that are padding for the mesh.
      start: int32[batch * beams], the number of tokens in each row.
      beams: the numbers of beams and groups.
      scores: how many of the most likely tokens to report with each token; None for no scores.
    """
    shape = len(real), beams.num_beams
    zeros, empty = jnp.zeros(shape, jnp.int32), jnp.full(shape, -jnp.inf, jnp.float32)
    first = jnp.arange(beams.num_beams, dtype=jnp.int32) % beams.group_size == 0
    count = jnp.zeros((len(real), beams.num_groups), jnp.int32)
    done = jnp.broadcast_to(~real[:, None], count.shape)
    token_scores = None if scores is None else Scores.zeros(shape, scores)
    finished = Hypotheses(empty, zeros, zeros, zeros, token_scores)
    score = jnp.where(first[None], 0.0, empty)
    return SearchState(zeros, score, count, done, real & False, finished, start.reshape(shape))


def advance(
    before: SearchState,
    logprobs: Array,
    raw_logprobs: Array,
    eos: Array,
    params: SearchParams,
    limit: Array,
    beams: BeamConfig,
    scores: int | None,
) -> tuple[SearchState, BeamChoice]:
    """Choose the next token of every beam whose group is not done.

    Args:
      before: the state.
      logprobs: float32[batch, beams, vocab], after penalties and filters.
      raw_logprobs: the model's log-probabilities before penalties and filters, for ``scores``.
      eos: int32[batch, n], the tokens that end a sequence. Padding is a number outside of the
        vocabulary.
      params: the numeric settings of the search.
      limit: int32[], the maximum number of new tokens.
      beams: the numbers of beams and groups.
      scores: how many of the most likely tokens to report with each token; None for no scores.
    """
    batch, _, vocab = logprobs.shape
    reported = None
    if scores is not None:
        reported = raw_logprobs, *(lax.top_k(raw_logprobs, scores) if scores else ())
    counts, results = jnp.zeros((batch, vocab), jnp.float32), []
    for group in range(beams.num_groups):
        first = group * beams.group_size
        members = slice(first, first + beams.group_size)
        group_logprobs = logprobs[:, members]
        if group:
            group_logprobs = group_logprobs - params.diversity_penalty * counts[:, None]
        rows = before.token, before.score, before.finished, reported
        rows = jax.tree.map(lambda x, members=members: x[:, members], rows)
        step: Any = functools.partial(_advance_group, params=params, limit=limit, first=first)
        state = before.count[:, group], before.done[:, group]
        results.append(jax.vmap(step)(group_logprobs, *rows, *state, eos))
        if beams.num_groups > 1:
            token, score = results[-1][:2]
            real = (score > -jnp.inf) & ~before.done[:, group, None]
            at = jnp.where(real, token, vocab)
            counts = counts.at[jnp.arange(batch, dtype=jnp.int32)[:, None], at].add(
                1.0, mode="drop"
            )
    *rows, count, done = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *results)
    token, score, finished, choice = jax.tree.map(
        lambda x: x.reshape(batch, beams.num_beams, *x.shape[3:]), tuple(rows)
    )
    none_left = jnp.all(score == -jnp.inf, 1) & jnp.all(finished.score == -jnp.inf, 1)
    broken = (before.broken | none_left) & jnp.any(~before.done, axis=1)
    after = replace(before, token=token, score=score, finished=finished, count=count, done=done)
    return replace(after, broken=before.broken | broken), choice


_Reported = tuple[Array, ...] | None
"""The model's log-probabilities and, if they are reported, the highest log-probabilities and their
token ids."""


def _advance_group(
    logprobs: Array,
    token: Array,
    score: Array,
    finished: Hypotheses,
    reported: _Reported,
    count: Array,
    done: Array,
    eos: Array,
    *,
    params: SearchParams,
    limit: Array,
    first: int,
) -> tuple[Array, Array, Hypotheses, BeamChoice, Array, Array]:
    """Do the work of ``advance`` for one group of one prompt. The beams of the group are numbered
    from ``first`` on. Returns the token and the score of each beam, finished sequences, the choice,
    ``count``, and whether the group is done."""
    size, length = len(score), count + 1
    last = length >= limit
    running, ending = _candidates(logprobs, score, eos)
    # Of the best candidates of both kinds, the ending ones become finished sequences.
    best = jax.tree.map(lambda *x: jnp.concatenate(x), running, ending)
    order = jnp.lexsort((best.beam * logprobs.shape[1] + best.token, -best.score))[:size]
    best = jax.tree.map(lambda x: x[order], best)
    value = best.score / length.astype(jnp.float32) ** params.length_penalty
    finishes = (best.ends | last) & ~done & (best.score > -jnp.inf)
    new = Hypotheses(
        jnp.where(finishes, value, -jnp.inf),
        jnp.full(size, length, jnp.int32),
        best.token,
        best.beam + first,
        _token_scores(reported, best.beam, best.token),
    )
    merged = jax.tree.map(lambda *x: jnp.concatenate(x), finished, new)
    _, top = lax.top_k(merged.score, size)
    finished = jax.tree.map(lambda x: x[top], merged)

    child, parent = _assign_rows(running)
    full = jnp.all(finished.score > -jnp.inf)
    longest = params.early_stopping == 2
    best_length = jnp.where(longest & (params.length_penalty > 0), limit, length)
    reachable = jnp.max(running.score) / best_length.astype(jnp.float32) ** params.length_penalty
    worst = jnp.where(full, jnp.min(finished.score), -jnp.inf)
    over = last | ~(reachable > worst) | (full & (params.early_stopping == 1))
    choice = BeamChoice(
        jnp.where(done, jnp.arange(size, dtype=jnp.int32), parent) + first,
        _token_scores(reported, running.beam[child], running.token[child]),
    )
    return (
        jnp.where(done, token, running.token[child]),
        jnp.where(done, score, running.score[child]),
        finished,
        choice,
        jnp.where(done, count, length),
        done | over,
    )


def _token_scores(reported: _Reported, beam: Array, token: Array) -> Scores | None:
    """Return the scores of ``token`` after ``beam`` (both int32[n])."""
    if reported is None:
        return None
    logprobs, *top = reported
    chosen = logprobs[beam, token]
    if not top:
        none = (jnp.zeros((len(beam), 0), x) for x in (jnp.int32, jnp.float32))
        return Scores(chosen, jnp.zeros_like(chosen), *none)
    values, ids = (x[beam] for x in top)
    return Scores(chosen, jnp.zeros_like(chosen), ids.astype(jnp.int32), values)


class _Candidates(NamedTuple):
    """Continuations of beams by one token. All arrays are [n]."""

    score: Array
    token: Array
    beam: Array
    ends: Array


def _candidates(logprobs: Array, score: Array, eos: Array) -> tuple[_Candidates, _Candidates]:
    """Return the continuations of a group's beams by one token. The first result has continuations
    without an end token: the best ones, one per beam of the group, best first. The second result
    has all continuations with an end token."""
    size, vocab = logprobs.shape
    total = logprobs + score[:, None]
    best, token = lax.top_k(total.at[:, eos].set(-jnp.inf, mode="drop"), min(size, vocab))
    per_beam = best.shape[1]
    best, at = lax.top_k(best.ravel(), size)
    at = at.astype(jnp.int32)
    running = _Candidates(best, token.ravel()[at], at // per_beam, jnp.zeros(size, bool))
    order = jnp.arange(len(eos), dtype=jnp.int32)
    repeated = jnp.any((eos[:, None] == eos[None]) & (order[None] < order[:, None]), axis=1)
    ids = jnp.minimum(eos, vocab - 1)
    end = jnp.where((repeated | (eos >= vocab))[None], -jnp.inf, total[:, ids])
    beam = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[:, None], end.shape)
    ending = end, jnp.broadcast_to(ids[None], end.shape), beam, jnp.ones(end.shape, bool)
    return running, _Candidates(*(x.ravel() for x in ending))


def _assign_rows(running: _Candidates) -> tuple[Array, Array]:
    """Assign a candidate to each row. Returns the candidates, int32[size], and the rows that they
    continue. A row gets a candidate that continues it, if there is one."""
    rows = jnp.arange(len(running.score), dtype=jnp.int32)
    real, beam = running.score > -jnp.inf, running.beam
    same = (beam[:, None] == beam[None]) & real[None]
    stays = real & ~jnp.any(same & (rows[None] < rows[:, None]), axis=1)
    is_parent = beam[None] == rows[:, None]
    has_child = jnp.any(stays[None] & is_parent, axis=1)
    free, moved = (jnp.cumsum(~x, dtype=jnp.int32) for x in (has_child, stays))
    is_moved = ~has_child[:, None] & (free[:, None] == moved[None])
    assigned = jnp.where(stays[None], is_parent, is_moved)
    child = lax.argmax(assigned, 1, jnp.int32)
    return child, jnp.where(real[child], beam[child], rows)
