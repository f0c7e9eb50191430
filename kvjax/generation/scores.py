"""Log-probabilities of tokens that were chosen, and the likeliest beside them."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from kvjax.core.trees import state
from kvjax.core.typing import Array, Rows
from kvjax.generation.filters import Logits


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
        return cls(jnp.zeros(shape), jnp.zeros(wide, jnp.int32), jnp.zeros(wide))


def scores_of(logits: Logits, token: Rows, most: int) -> Scores:
    """The scores of a token a row, with the ``most`` likeliest."""
    known = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(known, token[:, None], axis=1, mode="clip")[:, 0]
    if most == 0:
        return Scores(chosen, *(jnp.zeros((len(token), 0), x) for x in (jnp.int32, jnp.float32)))
    likeliest, ids = lax.top_k(known, most)
    return Scores(chosen, ids.astype(jnp.int32), likeliest)
