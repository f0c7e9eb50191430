"""Penalties and filters: functions that change logits. Filters set the logits of dropped tokens to
-inf.

Nothing is sorted. Top-k, top-p and typical-p keep the tokens at or above a threshold, which is
found by bisection over the 2**32 ordered bit patterns of float32. For 49,152 logits on a CPU, this
takes a twentieth of the time of a sort. ``k`` and ``p`` can be traced, and are one number for all
rows or one per row. All tokens that are equal to the threshold are kept.
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
"""A bit per token, 32 per word, lowest bit first. It is 1 for tokens that may be drawn."""
ALL_ALLOWED = np.uint32(0xFFFFFFFF)
"""A word that allows all its tokens."""
_ARGMAX_BLOCK = 128
"""The number of tokens that the first pass of ``argmax`` reduces to their maximum."""


def add_bias(logits: Logits, tokens: Int[Array, "batch n"], by: Float[Array, "batch n"]) -> Logits:
    """Add ``by`` to the logits of a row's ``tokens``. Ids outside the vocabulary are ignored."""
    return _add_at(logits, tokens, by)


def set_at(array: Array, at: Int[Array, "batch *n"], values: Any) -> Array:
    """Set the entries ``at`` of each row of an array [batch, n, ...] to ``values``, which is one
    number or an array. Out-of-range indices are ignored.

    The function maps over rows with ``vmap``. If the indices contained row numbers, every device of
    a mesh would gather all rows.
    """
    if isinstance(values, jax.Array):
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(array, at, values)
    return jax.vmap(lambda row, at: row.at[at].set(values, mode="drop"))(array, at)


def _add_at(array: Array, at: Int[Array, "batch n"], more: Array) -> Array:
    return jax.vmap(lambda row, at, new: row.at[at].add(new, mode="drop"))(array, at, more)


def keep_allowed(logits: Logits, allowed: Allowed) -> Logits:
    """Keep the tokens whose bit in ``allowed`` is 1."""
    index = jnp.arange(logits.shape[1], dtype=jnp.uint32)
    bits = allowed[:, index // 32] >> (index % 32)[None]
    return jnp.where(bits & 1 == 1, logits, -jnp.inf)


def penalize(logits: Logits, seen: Seen, penalty: Array | float) -> Logits:
    """Divide the positive logits of ``seen`` tokens by ``penalty``, and multiply the negative ones
    by it.

    Source: Keskar et al., CTRL, arXiv:1909.05858, in the form of Transformers.
    """
    penalty = _column(penalty)
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def count_tokens(
    tokens: Tokens, first: PerRow, end: PerRow, vocab: int
) -> Int[Array, "batch vocab"]:
    """Count how many times each token of the vocabulary occurs in a row's tokens from ``first`` up
    to ``end``."""
    at = arange_row(tokens.shape[1])
    inside = (at >= first[:, None]) & (at < end[:, None])
    zeros = jnp.zeros((len(tokens), vocab), jnp.int32)
    return _add_at(zeros, jnp.where(inside, tokens, vocab), inside.astype(jnp.int32))


def penalize_counts(
    logits: Logits,
    counts: Int[Array, "batch vocab"],
    frequency: Array | float,
    presence: Array | float,
) -> Logits:
    """Subtract ``frequency`` times a token's count from its logit, and ``presence`` if it occurs.

    Source: OpenAI's API, in the form of vLLM.
    """
    logits = logits - _column(frequency) * counts.astype(jnp.float32)
    return logits - jnp.where(counts > 0, _column(presence), 0)


def keep_new_ngrams(logits: Logits, tokens: Tokens, length: PerRow, n: Array | int) -> Logits:
    """Drop the tokens that would repeat an n-gram of the row's first ``length`` tokens. If this
    would drop all tokens of a row, the row is not changed. An ``n`` of 0 means no limit.

    Source: Paulus et al., arXiv:1705.04304, in the form of Transformers.
    """
    at, n = arange_row(tokens.shape[1]), jnp.reshape(jnp.asarray(n, jnp.int32), (-1, 1))
    n = jnp.broadcast_to(n, length[:, None].shape)
    end = length[:, None]
    # A token is banned if the n - 1 tokens before it equal the row's last n - 1 tokens.
    banned = (at >= n - 1) & (at < end) & (n > 0)

    def more(carry: tuple[Array, Array]) -> Array:
        back, banned = carry
        return jnp.any(banned & (back < n))

    def step(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        back, banned = carry
        last = jnp.take_along_axis(tokens, end - back, axis=1, mode="clip")
        equal = jnp.roll(tokens, back, axis=1) == last
        return back + 1, banned & (equal | (back >= n))

    _, banned = lax.while_loop(more, step, (jnp.int32(1), banned))
    left = set_at(logits, jnp.where(banned, tokens, logits.shape[1]), -jnp.inf)
    return jnp.where(jnp.any(left > -jnp.inf, axis=1, keepdims=True), left, logits)


def keep_top_k(logits: Logits, k: Array | int) -> Logits:
    """Keep each row's ``k`` largest logits, and all logits equal to the k-th.

    Source: Fan et al., arXiv:1805.04833.
    """
    return _keep(logits, ranked_by_k(logits, k))


def keep_top_p(logits: Logits, p: Array | float) -> Logits:
    """Keep a token if all more likely tokens together have a probability below ``p``. The most
    likely token is always kept.

    Source: Holtzman et al., arXiv:1904.09751.
    """
    return _keep(logits, ranked_by_p(logits, p))


def keep_min_p(logits: Logits, min_p: Array | float) -> Logits:
    """Keep the tokens whose probability is at least ``min_p`` times the highest probability.

    Source: Nguyen et al., arXiv:2407.01082.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - largest >= jnp.log(_column(min_p)), logits, -jnp.inf)


def keep_typical(logits: Logits, p: Array | float) -> Logits:
    """Keep the tokens whose information content is closest to the entropy: the fewest that together
    have a probability of at least ``p``.

    Source: Meister et al., arXiv:2202.00666.
    """
    return _keep(logits, ranked_by_typicality(logits, p))


def exclude_top_choices(
    logits: Logits, threshold: Array | float, exclude: RowMask, kept: Int[Array, "batch n"]
) -> Logits:
    """Drop the tokens with a probability above ``threshold``, except the least likely of them. Only
    rows where ``exclude`` is true are changed. The tokens ``kept`` are never dropped.

    Source: https://github.com/oobabooga/text-generation-webui/pull/6335, in the form of mlx-lm.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    top = probabilities > _column(threshold)
    least = jnp.min(jnp.where(top, probabilities, jnp.inf), axis=-1, keepdims=True)
    dropped = set_at(top & (probabilities > least) & exclude[:, None], kept, False)
    return jnp.where(dropped, -jnp.inf, logits)


class Ranking(NamedTuple):
    """A filter in the form of a ranking of tokens. It keeps a token if the ``weights`` of all
    tokens that rank higher (with a larger ``ordered``) sum to less than ``limit``."""

    ordered: Int[Array, "batch vocab"]
    weights: Array
    limit: Array | float

    def keeps(self, token: PerRow) -> RowMask:
        """Return whether one token per row is kept. This needs one pass over the vocabulary, while
        ``threshold`` needs 32."""
        mine = jnp.take_along_axis(self.ordered, token[:, None], axis=1)
        return self._above(mine) < self.limit

    def threshold(self) -> Int[Array, "batch 1"]:
        """Return the smallest value of ``ordered`` that is kept."""

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
    """Return the ranking of ``keep_top_k``."""
    return Ranking(_ordered(logits), jnp.ones_like(logits, jnp.int32), k)


def ranked_by_p(logits: Logits, p: Array | float) -> Ranking:
    """Return the ranking of ``keep_top_p``."""
    return Ranking(_ordered(logits), jax.nn.softmax(logits, axis=-1), p)


def ranked_by_typicality(logits: Logits, p: Array | float) -> Ranking:
    """Return the ranking of ``keep_typical``."""
    known = jax.nn.log_softmax(logits, axis=-1)
    weights = jnp.exp(known)
    expected = jnp.sum(jnp.where(weights > 0, weights * known, 0), axis=-1, keepdims=True)
    return Ranking(_ordered(-jnp.abs(known - expected)), weights, p)


def argmax(logits: Logits) -> PerRow:
    """Return the index of each row's largest logit, int32[batch]. Among equal logits, it is the
    first.

    CPUs compute ``argmax`` one number at a time. So the maximum of each block is computed first,
    which is vectorized, and the index is searched in one block only.
    """
    batch, vocab = logits.shape
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % _ARGMAX_BLOCK)), constant_values=-jnp.inf)
    blocks = blocks.reshape(batch, -1, _ARGMAX_BLOCK)
    index = lax.argmax(blocks.max(axis=2), 1, jnp.int32)
    block = jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]
    return index * _ARGMAX_BLOCK + lax.argmax(block, 1, jnp.int32)


def _column(number: Array | float) -> Array:
    """Convert a number, or one number per row, to float32[1, 1] or float32[batch, 1]."""
    return jnp.reshape(jnp.asarray(number, jnp.float32), (-1, 1))


def _keep(logits: Logits, ranking: Ranking) -> Logits:
    return jnp.where(ranking.ordered >= ranking.threshold(), logits, -jnp.inf)


def _ordered(numbers: Float[Array, "batch vocab"]) -> Int[Array, "batch vocab"]:
    """Convert float32 numbers to int32 values with the same order."""
    bits = lax.bitcast_convert_type(jnp.where(numbers == 0, 0.0, numbers), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
