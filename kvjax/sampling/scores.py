"""Log-probabilities of tokens that were chosen, and the likeliest beside them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow
from kvjax.sampling.filters import Allowed, Logits, keep_allowed

MAX_LOGPROBS = 20
"""The likeliest tokens that are told with one, at most."""


@dataclass(frozen=True)
class TokenScore:
    """Of a new token: ``logprob``, its log-probability by the model's own distribution, before
    filters and temperature; ``likeliest``: as many tokens as were asked for, with theirs;
    ``drawn``: its log-probability by the distribution that it was drawn from, behind them, which is
    0 where the likeliest token was taken."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    drawn: float


@pytree_dataclass
class Scores:
    """Of a token a row: ``chosen``, its log-probability by the model's own distribution, before any
    filter or temperature; ``drawn``, that by the distribution that it was drawn from; ``ids`` and
    ``likeliest``: the likeliest tokens and theirs, falling."""

    chosen: Float[Array, "*batch"]
    drawn: Float[Array, "*batch"]
    ids: Int[Array, "*batch most"]
    likeliest: Float[Array, "*batch most"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], most: int) -> "Scores":
        """For arrays of tokens of this shape."""
        wide = (*shape, most)
        one, likeliest = jnp.zeros(shape, jnp.float32), jnp.zeros(wide, jnp.float32)
        return cls(one, one, jnp.zeros(wide, jnp.int32), likeliest)


def score_tokens(
    logits: Logits,
    token: PerRow,
    most: int,
    *,
    filtered: Logits | None,
    temperature: Array,
    among: Allowed | None = None,
) -> Scores:
    """The scores of a token a row, with the ``most`` likeliest; ``filtered``: the logits that it
    was drawn from, where its row's ``temperature`` is not 0; None where that is so of no row;
    ``among``: bits of those that the likeliest are looked for in, None for all."""
    known = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = take_tokens(known, token)
    drawn = jnp.zeros_like(chosen)
    if filtered is not None:
        drawn = take_tokens(jax.nn.log_softmax(filtered, axis=-1), token)
        drawn = jnp.where(temperature > 0, drawn, 0)
    if most == 0:
        none = (jnp.zeros((len(token), 0), x) for x in (jnp.int32, jnp.float32))
        return Scores(chosen, drawn, *none)
    likeliest, ids = lax.top_k(known if among is None else keep_allowed(known, among), most)
    return Scores(chosen, drawn, ids.astype(jnp.int32), likeliest)


def take_tokens(numbers: Float[Array, "*rest vocab"], tokens: Int[Array, "*rest"]) -> Array:
    """Of numbers for every token of a vocabulary, those of one: [*rest]."""
    return jnp.take_along_axis(numbers, tokens[..., None], axis=-1, mode="clip")[..., 0]


def token_scores(scores: Any, row: int, first: int, end: int, most: int) -> list[TokenScore]:
    """Of a row's tokens from one to another, from ``Scores`` of [batch, tokens] on the host."""
    chosen, drawn = (x[row, first:end].tolist() for x in (scores.chosen, scores.drawn))
    ids = scores.ids[row, first:end, :most].tolist()
    likeliest = scores.likeliest[row, first:end, :most].tolist()
    return [
        TokenScore(own, tuple(zip(*others, strict=True)), of_draw)
        for own, of_draw, *others in zip(chosen, drawn, ids, likeliest, strict=True)
    ]
