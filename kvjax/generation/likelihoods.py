"""Log-likelihoods of many continuations: what contexts have in common is computed once."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.checks import check
from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import ArgumentError, NonFiniteError, as_int
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model, check_model, choose_capacity
from kvjax.generation.request import padded_width
from kvjax.layouts import unpaged_layout
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.operations.rows import select
from kvjax.placement.mesh import DATA
from kvjax.policies.model_config import position_limit, same_rotary
from kvjax.policies.presets import Auto, PolicyChoice, per_layer, policy
from kvjax.sampling.scores import take_tokens

TokenIds = tuple[int, ...]

MIN_SHARED = 64
"""Common prefixes that are shorter than this are not looked for."""
MAX_LOGITS = 2**26
"""The most logits that a call returns, rows times tokens times vocabulary."""
_SMALLEST_WIDTH = 8
"""Calls for continuations have a power of two of tokens from here on."""
_SMALLEST_CAPACITY = 256
"""Caches hold a power of two of tokens from here on: each capacity compiles its own programs."""


class Likelihood(NamedTuple):
    """A continuation's score.

    Attributes:
      logprob: its log-probability after its context.
      greedy: whether each of its tokens is the most likely one.
    """

    logprob: float
    greedy: bool


@without_mesh_context
def likelihoods(
    lm: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    cache: PolicyChoice = "static",
    rows: int = 8,
    prefill_chunk: int = PREFILL_CHUNK,
    callback: Callable[[int], object] = lambda count: None,
) -> list[Likelihood]:
    """The log-likelihoods of continuations after their contexts.

    Equal contexts are computed once for all their continuations, and a long common prefix of
    several contexts is computed once for all of them. ``kvjax.score`` is for few prompts at once,
    is differentiable, and also returns the log-probability of each token.

    Args:
      lm: the model.
      pairs: the token ids of a context and of its continuation, both at least one token.
      cache: a policy, or its name. Paged layers are used without pages.
      rows: contexts that are computed together; on a mesh, rounded up to a multiple of ``data``.
      prefill_chunk: the most tokens of a row that are processed together.
      callback: called with the number of continuations that are done since the last call.

    Raises:
      ValueError: if a context or a continuation is empty or has a token outside the vocabulary, if
        both together exceed the model's positions, or if the model has an encoder.
      NonFiniteError: if logits are not finite.
    """
    check_model(lm)
    refuse_encoder("likelihoods", lm)
    scores: dict[TokenIds, dict[TokenIds, Likelihood]] = {}
    keys = [(tuple(context), tuple(continuation)) for context, continuation in pairs]
    for number, (context, continuation) in enumerate(keys):
        if not context or not continuation:
            what = "continuation" if context else "context"
            raise ArgumentError(f"the {what} of pair {number} is empty", param="pairs")
        lm.check_ids((*context, *continuation))
        scores.setdefault(context, {})[continuation] = Likelihood(0.0, True)
    data = 1 if lm.mesh is None else lm.mesh.shape.get(DATA, 1)
    run = _Run(
        lm,
        _without_pages(lm, cache),
        scores,
        data,
        -(-as_int("rows", rows, 1) // data) * data,
        as_int("prefill_chunk", prefill_chunk, 1),
        callback,
    )
    run.score(sorted(scores), 0, None)
    return [scores[context][continuation] for context, continuation in keys]


class _Run(NamedTuple):
    """The arguments of ``likelihoods``; ``scores`` receives the results, by context."""

    lm: LanguageModel
    policy: PolicyChoice
    scores: dict[TokenIds, dict[TokenIds, Likelihood]]
    data: int
    rows: int
    chunk: int
    callback: Callable[[int], object]

    def score(self, contexts: list[TokenIds], base: int, cache: KVCache | None) -> None:
        """Score the continuations of sorted contexts, whose first ``base`` tokens are in each row
        of ``cache``.

        Contexts that share enough further tokens are scored first, from a cache with these. The
        others are scored in batches of similar length.
        """
        others = []
        for group in _groups(contexts, base + MIN_SHARED):
            shared = min(_common(group[0], group[-1]), min(map(len, group)) - 1)
            saved = (len(group) - 1) * (shared - base)
            if saved < self.rows * MIN_SHARED:  # a batch of its own would cost as much
                others += group
                continue
            prefix, old = group[0][base:shared], cache
            if old is None:
                old = self._empty(self.data, group)
            _, new = self._append(old, [prefix] * self.data, donate=cache is None)
            self.score(group, shared, new)
        others.sort(key=self._length, reverse=True)
        for start in range(0, len(others), self.rows):
            self._score_batch(others[start : start + self.rows], base, cache)

    def _score_batch(self, batch: list[TokenIds], base: int, cache: KVCache | None) -> None:
        rows = self._row_count(len(batch))
        # Each device continues its own copy of the prefix.
        copies = (np.arange(rows) * self.data // rows).astype(np.int32)
        start = self._empty(rows, batch) if cache is None else _select(cache, copies)
        rest = [context[base:] for context in batch] + [()] * (rows - len(batch))
        last, start = self._append(start, rest, donate=True)
        # The n-th longest continuations of all contexts are processed together.
        ends = [sorted(self.scores[context], key=len, reverse=True) for context in batch]
        counts = [sum(len(end) > 1 for end in each) for each in ends]
        first, likeliest = fetch(_score_first(last, _first_tokens(ends, rows)))
        logprobs = [list(map(float, first[row, : len(each)])) for row, each in enumerate(ends)]
        greedy = [list(map(bool, likeliest[row, : len(each)])) for row, each in enumerate(ends)]
        after = start
        for number in range(max(counts)):
            tails = [
                each[number] if number < n else () for each, n in zip(ends, counts, strict=True)
            ]
            tails += [()] * (rows - len(batch))
            results, after = self._score_tails(start, tails)
            for row, n in enumerate(counts):
                if number < n:
                    logprobs[row][number] += results[row].logprob
                    greedy[row][number] &= results[row].greedy
        check(after)
        if any(math.isnan(logprob) for each in logprobs for logprob in each):
            raise NonFiniteError("the logits after a context or continuation are not finite")
        for context, each, *values in zip(batch, ends, logprobs, greedy, strict=True):
            self.scores[context].update(zip(each, map(Likelihood, *values), strict=True))
        self.callback(sum(map(len, ends)))

    def _score_tails(
        self, cache: KVCache, continuations: list[TokenIds]
    ) -> tuple[list[Likelihood], KVCache]:
        """Score the tokens of continuations after the first one; ``cache`` is not donated."""
        lm, rows = self.lm, len(continuations)
        logprobs, greedy = [0.0] * rows, [True] * rows
        fitting = max(MAX_LOGITS // (rows * lm.config.vocab_size), _SMALLEST_WIDTH)
        chunk = min(self.chunk, 1 << (fitting.bit_length() - 1))
        width = max(map(len, continuations)) - 1
        for start in range(0, width, chunk):
            size = min(chunk, _power_of_two(width - start))
            tokens, lengths = _pad([x[:-1][start : start + size] for x in continuations], size)
            targets, _ = _pad([x[1:][start : start + size] for x in continuations], size)
            call = _donating_tails if start else _keeping_tails
            own, best, cache = call(lm.architecture, lm.params, tokens, targets, cache, lengths)
            own, best = fetch((own, best))
            for row, length in enumerate(lengths.tolist()):
                logprobs[row] += float(own[row, :length].sum(dtype=np.float64))
                greedy[row] &= bool(best[row, :length].all())
        return [Likelihood(*each) for each in zip(logprobs, greedy, strict=True)], cache

    def _append(
        self, cache: KVCache, rows: Sequence[TokenIds], *, donate: bool
    ) -> tuple[Array, KVCache]:
        """Append tokens to each row; returns the logits after the last token of each row."""
        lm, width, last = self.lm, max(map(len, rows)), None
        for start in range(0, width, self.chunk):
            size = padded_width(min(width - start, self.chunk), self.chunk)
            tokens, lengths = _pad([ids[start : start + size] for ids in rows], size)
            call = _donating_append if donate or start else _keeping_append
            logits, cache = call(lm.architecture, lm.params, tokens, cache, lengths)
            last = logits if last is None else jnp.where((lengths > 0)[:, None], logits, last)
        assert last is not None
        return last, cache

    def _empty(self, rows: int, contexts: list[TokenIds]) -> KVCache:
        """An empty cache that holds each of the contexts with its longest continuation."""
        longest, config = max(map(self._length, contexts)), self.lm.config
        capacity = choose_capacity(config, longest, 1, None, None, new="a target token, ")
        rounded = max(_SMALLEST_CAPACITY, 1 << (longest - 1).bit_length())
        rounded = min(rounded, position_limit(config) or rounded)
        if same_rotary(config, longest, rounded):
            capacity = rounded
        return allocate(
            self.lm.config,
            self.policy,
            batch=rows,
            max_len=capacity,
            initial_len=capacity,
            mesh=self.lm.mesh,
        )

    def _length(self, context: TokenIds) -> int:
        """Tokens that the model reads of a context and its longest continuation."""
        return len(context) + max(map(len, self.scores[context])) - 1

    def _row_count(self, contexts: int) -> int:
        """The rows of a batch: all, or a fourth for a few contexts. More sizes would compile more
        programs."""
        few = -(-self.rows // (4 * self.data)) * self.data
        return few if contexts <= few else self.rows


def _without_pages(lm: LanguageModel, choice: PolicyChoice) -> PolicyChoice:
    """The policy, with the layouts in its pages: all rows end together, so pages save nothing."""
    choice = policy(choice) if isinstance(choice, str) else choice
    if isinstance(choice, Auto):
        return choice
    layers = per_layer(choice, lm.config)
    return [replace(each, layout=unpaged_layout(each.layout)) for each in layers]


def _groups(contexts: list[TokenIds], least: int) -> Iterator[list[TokenIds]]:
    """Runs of sorted contexts of which neighbors have at least ``least`` first tokens in common."""
    start = 0
    for end in range(1, len(contexts) + 1):
        if end == len(contexts) or contexts[end - 1][:least] != contexts[end][:least]:
            yield contexts[start:end]
            start = end


def _common(a: TokenIds, b: TokenIds) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(a), len(b)))


def _power_of_two(tokens: int) -> int:
    return max(_SMALLEST_WIDTH, 1 << (tokens - 1).bit_length())


def _first_tokens(ends: list[list[TokenIds]], rows: int) -> np.ndarray:
    """int32[rows, most]: the first token of each continuation, padded."""
    most = _power_of_two(max(map(len, ends)))
    firsts = [tuple(end[0] for end in each) for each in ends]
    return _pad([*firsts, *[()] * (rows - len(ends))], most)[0]


def _pad(rows: Sequence[TokenIds], width: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[rows, width], padded with 0, and the lengths, int32[rows]."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths


_select = jax.jit(select)


def _append(
    model: Model, params: PyTree, tokens: Tokens, cache: KVCache, lengths: PerRow
) -> tuple[Array, KVCache]:
    """The logits after each row's last token, float32[batch, vocab], and the cache."""
    logits, cache = model.apply(params, tokens, cache, lengths=lengths, last_only=True)
    return logits[:, 0].astype(jnp.float32), cache


@jax.jit
def _score_first(logits: Array, tokens: Array) -> tuple[Array, Array]:
    """The log-probability of each token of a row, and whether it is the most likely one."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens, axis=1, mode="clip")
    return own, tokens == jnp.argmax(logits, axis=-1)[:, None].astype(tokens.dtype)


def _tails(
    model: Model, params: PyTree, tokens: Tokens, targets: Array, cache: KVCache, lengths: PerRow
) -> tuple[Array, Array, KVCache]:
    """The log-probability of each target after its token, whether it is the most likely one, and
    the cache."""
    logits, cache = model.apply(params, tokens, cache, lengths=lengths)
    logits = logits.astype(jnp.float32)
    own = take_tokens(jax.nn.log_softmax(logits, axis=-1), targets)
    best = targets == jnp.argmax(logits, axis=-1).astype(targets.dtype)
    real = arange_row(targets.shape[1]) < lengths[:, None]
    return jnp.where(real, own, 0), best | ~real, cache


_keeping_append = jax.jit(_append, static_argnames="model")
_donating_append = jax.jit(_append, static_argnames="model", donate_argnames="cache")
_keeping_tails = jax.jit(_tails, static_argnames="model")
_donating_tails = jax.jit(_tails, static_argnames="model", donate_argnames="cache")
