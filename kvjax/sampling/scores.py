"""Log-probabilities of chosen tokens, and of the most likely ones."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, PyTree

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow
from kvjax.sampling.filters import Allowed, Logits, keep_allowed

MAX_LOGPROBS = 20
"""The maximum number of most likely tokens that are reported with each new token."""


@dataclass(frozen=True)
class TokenScore:
    """The log-probabilities that are reported for one new token.

    Attributes:
      logprob: the token's log-probability under the model's distribution, before filters and
        temperature.
      top_logprobs: the most likely tokens, each with its log-probability, most likely first.
      sampling_logprob: the token's log-probability under the filtered distribution from which it
        was drawn; 0 if decoding was greedy.
    """

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    sampling_logprob: float


@pytree_dataclass
class Scores:
    """The fields of ``TokenScore`` as arrays, for several tokens.

    ``top_ids`` and ``top_logprobs`` have the most likely tokens and their log-probabilities, most
    likely first.
    """

    logprobs: Float[Array, "*batch"]
    sampling_logprobs: Float[Array, "*batch"]
    top_ids: Int[Array, "*batch most"]
    top_logprobs: Float[Array, "*batch most"]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], most: int) -> "Scores":
        """Return scores of 0 for tokens of the shape ``shape``. Each token has ``most`` entries in
        ``top_ids`` and ``top_logprobs``."""
        zeros = jnp.zeros(shape, jnp.float32)
        ids = jnp.zeros((*shape, most), jnp.int32)
        return cls(zeros, zeros, ids, jnp.zeros((*shape, most), jnp.float32))


def score_tokens(
    logits: Logits,
    token: PerRow,
    most: int,
    *,
    filtered: Logits | None,
    temperature: Array,
    among: Allowed | None = None,
) -> Scores:
    """Compute the scores of one token per row.

    Args:
      logits: the model's logits.
      token: the chosen tokens.
      most: how many of the most likely tokens to report.
      filtered: the logits from which the tokens were drawn; None if all rows are greedy.
      temperature: the temperature of each row; 0 means greedy.
      among: the bit mask of the tokens from which the most likely ones are selected; None for all
        tokens.
    """
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
    """Select the entries of ``tokens`` ([*rest]) from an array over the vocabulary, [*rest,
    vocab]."""
    return jnp.take_along_axis(numbers, tokens[..., None], axis=-1, mode="clip")[..., 0]


def token_scores(scores: PyTree, row: int, first: int, end: int, most: int) -> list[TokenScore]:
    """Return the scores of a row's tokens from ``first`` up to ``end``, from ``Scores`` [batch,
    tokens] on the host."""
    chosen, drawn = (
        x[row, first:end].tolist() for x in (scores.logprobs, scores.sampling_logprobs)
    )
    ids = scores.top_ids[row, first:end, :most].tolist()
    likeliest = scores.top_logprobs[row, first:end, :most].tolist()
    return [
        TokenScore(logprob, tuple(zip(*most_likely, strict=True)), drawn_logprob)
        for logprob, drawn_logprob, *most_likely in zip(chosen, drawn, ids, likeliest, strict=True)
    ]
