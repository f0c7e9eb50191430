"""What of a row's logits may be drawn: filters, each of which leaves the rest at minus infinity.

Nothing is sorted: top-k, top-p and typical-p keep what lies at or above some threshold, found by
bisection over the 2**32 ordered bit patterns of float32: on a CPU a twentieth of the time of a sort
of 49,152 logits. So ``k`` and ``p`` are traced numbers, one for all or one a row, and tokens that
tie at the threshold are all kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int, UInt

from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array, PerRow, RowMask, Tokens

Logits = Float[Array, "batch vocab"]
Seen = Bool[Array, "batch vocab"]
Allowed = UInt[Array, "batch words"]
"""A bit for each token of a row, 32 in a word, the lowest first; 1 for what may be drawn."""
ALL_ALLOWED = np.uint32(0xFFFFFFFF)
"""A word that allows its tokens, all of them."""
_ARGMAX_BLOCK = 128
"""Tokens whose largest logit is found in one go."""


def add_bias(logits: Logits, tokens: Int[Array, "batch n"], by: Float[Array, "batch n"]) -> Logits:
    """Add numbers to the logits of a row's ``tokens``; but for such as are none."""
    return _add_at(logits, tokens, by)


def set_at(array: Array, at: Int[Array, "batch *n"], values: Any) -> Array:
    """An array [batch, n, ...] with numbers at places of each row, but for those outside; one
    number for all, or an array of them. Row by row: where rows are numbered among the indices, a
    mesh would give every device those of all."""
    if isinstance(values, jax.Array):
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(array, at, values)
    return jax.vmap(lambda row, at: row.at[at].set(values, mode="drop"))(array, at)


def _add_at(array: Array, at: Int[Array, "batch n"], more: Array) -> Array:
    return jax.vmap(lambda row, at, new: row.at[at].add(new, mode="drop"))(array, at, more)


def keep_allowed(logits: Logits, allowed: Allowed) -> Logits:
    """Keep the tokens whose bit is 1."""
    index = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = allowed[:, index // 32] >> (index % 32)[None]
    return jnp.where(bits & 1 == 1, logits, -jnp.inf)


def penalize(logits: Logits, seen: Seen, penalty: Array | float) -> Logits:
    """Divide the positive logits of ``seen`` tokens by ``penalty``, multiply the negative ones.

    Source: Keskar et al., CTRL, arXiv:1909.05858, in the form of Transformers.
    """
    penalty = _a_row(penalty)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def count_tokens(
    tokens: Tokens, first: PerRow, end: PerRow, vocab: int
) -> Int[Array, "batch vocab"]:
    """How often each token of the vocabulary stands in a row from one place to another."""
    at = arange_row(tokens.shape[1])
    there = (at >= first[:, None]) & (at < end[:, None])
    zeros = jnp.zeros((len(tokens), vocab), jnp.int32)
    return _add_at(zeros, jnp.where(there, tokens, vocab), there.astype(jnp.int32))


def penalize_counts(
    logits: Logits,
    counts: Int[Array, "batch vocab"],
    frequency: Array | float,
    presence: Array | float,
) -> Logits:
    """Subtract, of tokens that were counted, ``frequency`` for each time, and ``presence`` once.

    Source: OpenAI's API; as vLLM has them.
    """
    logits = logits - _a_row(frequency) * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, _a_row(presence), 0)


def keep_new_ngrams(logits: Logits, tokens: Tokens, length: PerRow, n: Array | int) -> Logits:
    """Keep the tokens that would not end a run of ``n`` that a row of ``length`` ``tokens`` has
    already; of a row that would be left with none, all. 0 is no limit.

    Source: Paulus et al., arXiv:1705.04304, in the form of Transformers.
    """
    at, n = arange_row(tokens.shape[1]), jnp.reshape(jnp.asarray(n, jnp.int32), (-1, 1))
    n = jnp.broadcast_to(n, length[:, None].shape)
    end = length[:, None]
    # A token is banned where the n - 1 before it are the row's last ones.
    banned = (at >= n - 1) & (at < end) & (n > 0)

    def go_on(carry: tuple[Array, Array]) -> Array:
        back, banned = carry
        return jnp.any(banned & (back < n))

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        back, banned = carry
        last = jnp.take_along_axis(tokens, end - back, axis=1, mode="clip")
        alike = jnp.roll(tokens, back, axis=1) == last
        return back + 1, banned & (alike | (back >= n))

    _, banned = lax.while_loop(go_on, one, (jnp.int32(1), banned))
    left = set_at(logits, jnp.where(banned, tokens, logits.shape[1]), -jnp.inf)
    return jnp.where(jnp.any(left > -jnp.inf, axis=1, keepdims=True), left, logits)


def keep_top_k(logits: Logits, k: Array | int) -> Logits:
    """Keep a row's ``k`` largest, and what ties with the k-th; the rest become minus infinity.

    Source: Fan et al., arXiv:1805.04833.
    """
    return _keep(logits, ranked_by_k(logits, k))


def keep_top_p(logits: Logits, p: Array | float) -> Logits:
    """Keep the tokens with less than ``p`` of the probability above them, so always the likeliest.

    Source: Holtzman et al., arXiv:1904.09751.
    """
    return _keep(logits, ranked_by_p(logits, p))


def keep_min_p(logits: Logits, min_p: Array | float) -> Logits:
    """Keep the tokens that are at least ``min_p`` times as likely as the likeliest.

    Source: Nguyen et al., arXiv:2407.01082.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - largest >= jnp.log(_a_row(min_p)), logits, -jnp.inf)


def keep_typical(logits: Logits, p: Array | float) -> Logits:
    """Keep the tokens whose surprise is nearest to the one expected, the fewest that hold ``p`` of
    the probability.

    Source: Meister et al., arXiv:2202.00666.
    """
    return _keep(logits, ranked_by_typicality(logits, p))


class Ranking(NamedTuple):
    """What a filter keeps: the tokens above which, in the order of their numbers ``ordered``, stand
    ``weights`` of less than ``limit``, in sum."""

    ordered: Int[Array, "batch vocab"]
    weights: Array
    limit: Array | float

    def keeps(self, token: PerRow) -> RowMask:
        """Whether it keeps a token of each row: one look, where the threshold takes 32."""
        mine = jnp.take_along_axis(self.ordered, token[:, None], axis=1)
        return self._above(mine) < self.limit

    def threshold(self) -> Int[Array, "batch 1"]:
        """Of ``ordered``, the least that is kept."""

        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low & high) + ((low ^ high) >> 1)
            below_limit = self._above(middle[:, None]) < self.limit
            return jnp.where(below_limit, low, middle + 1), jnp.where(below_limit, middle, high)

        low = jnp.full(self.ordered.shape[:1], -(2**31), jnp.int32)
        high = jnp.full_like(low, 2**31 - 1)
        return lax.fori_loop(np.int32(0), np.int32(32), halve, (low, high))[1][:, None]

    def _above(self, bounds: Int[Array, "batch 1"]) -> Array:
        kept = jnp.where(self.ordered > bounds, self.weights, 0)
        return jnp.sum(kept, axis=-1, dtype=self.weights.dtype)


def ranked_by_k(logits: Logits, k: Array | int) -> Ranking:
    """What ``keep_top_k`` goes by."""
    return Ranking(_ordered(logits), jnp.ones_like(logits, jnp.int32), k)


def ranked_by_p(logits: Logits, p: Array | float) -> Ranking:
    """What ``keep_top_p`` goes by."""
    return Ranking(_ordered(logits), jax.nn.softmax(logits, axis=-1), p)


def ranked_by_typicality(logits: Logits, p: Array | float) -> Ranking:
    """What ``keep_typical`` goes by."""
    known = jax.nn.log_softmax(logits, axis=-1)
    weights = jnp.exp(known)
    expected = jnp.sum(jnp.where(weights > 0, weights * known, 0), axis=-1, keepdims=True)
    return Ranking(_ordered(-jnp.abs(known - expected)), weights, p)


def argmax(logits: Logits) -> PerRow:
    """The first of each row's largest, int32[batch]. Pieces are looked at first, and then one of
    them: what a CPU does for the index of a maximum, it does number by number."""
    batch, vocab = logits.shape
    pieces = jnp.pad(logits, ((0, 0), (0, -vocab % _ARGMAX_BLOCK)), constant_values=-jnp.inf)
    pieces = pieces.reshape(batch, -1, _ARGMAX_BLOCK)
    first = lax.argmax(pieces.max(axis=2), 1, jnp.int32)
    piece = jnp.take_along_axis(pieces, first[:, None, None], axis=1)[:, 0]
    return first * _ARGMAX_BLOCK + lax.argmax(piece, 1, jnp.int32)


def _a_row(number: Array | float) -> Array:
    """One number for all rows, or one for each, beside their logits."""
    return jnp.reshape(jnp.asarray(number, jnp.float32), (-1, 1))


def _keep(logits: Logits, ranking: Ranking) -> Logits:
    return jnp.where(ranking.ordered >= ranking.threshold(), logits, -jnp.inf)


def _ordered(numbers: Float[Array, "batch vocab"]) -> Int[Array, "batch vocab"]:
    """Whole numbers in the order of float32."""
    bits = lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
