"""Log-probabilities of tokens that were chosen, and the likeliest beside them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from kvjax.core.trees import state
from kvjax.core.typing import Array, Rows
from kvjax.generation.filters import Logits

MOST_SCORES = 20
"""The likeliest tokens that are told with one, at most."""


@dataclass(frozen=True)
class TokenScore:
    """Of a new token: ``logprob``, its log-probability by the model's own distribution, before
    filters and temperature; ``likeliest``: as many tokens as were asked for, with theirs."""

    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@state
class Scores:
    """Of a token a row: ``chosen``, its log-probability by the model's own distribution, before any
    filter or temperature; ``ids`` and ``likeliest``: the likeliest tokens and theirs, falling."""

    chosen: Float[Array, "*batch"]
    ids: Int[Array, "*batch most"]
    likeliest: Float[Array, "*batch most"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], most: int) -> "Scores":
        """For arrays of tokens of this shape."""
        wide = (*shape, most)
        chosen, likeliest = jnp.zeros(shape, jnp.float32), jnp.zeros(wide, jnp.float32)
        return cls(chosen, jnp.zeros(wide, jnp.int32), likeliest)


def scores_of(logits: Logits, token: Rows, most: int) -> Scores:
    """The scores of a token a row, with the ``most`` likeliest."""
    known = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(known, token[:, None], axis=1, mode="clip")[:, 0]
    if most == 0:
        return Scores(chosen, *(jnp.zeros((len(token), 0), x) for x in (jnp.int32, jnp.float32)))
    likeliest, ids = lax.top_k(known, most)
    return Scores(chosen, ids.astype(jnp.int32), likeliest)


def token_scores(scores: Any, row: int, first: int, end: int, most: int) -> list[TokenScore]:
    """Of a row's tokens from one to another, from ``Scores`` of [batch, tokens] on the host."""
    chosen = scores.chosen[row, first:end].tolist()
    ids = scores.ids[row, first:end, :most].tolist()
    likeliest = scores.likeliest[row, first:end, :most].tolist()
    return [
        TokenScore(own, tuple(zip(*others, strict=True)))
        for own, *others in zip(chosen, ids, likeliest, strict=True)
    ]
