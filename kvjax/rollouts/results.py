"""What a rollout gives: arrays of fixed shapes."""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import check
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.errors import NonFiniteError
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array


@pytree_dataclass
class Rollout:
    """Rows of text, ``n`` for each prompt, one behind the other.

    ``tokens``: int32[rows, prompt + new], each row's prompt, its new tokens right behind it, and
    padding; ``prompt_lengths`` and ``lengths``: int32[rows], how many of either are real.
    ``logprobs``: float32[rows, new], of each new token by the model's own distribution, and
    ``drawn``, by the one that it was drawn from, behind temperature and filters; 0 behind the last.
    ``ended``: bool[rows], by an end token, which is the row's last; the others came to their limit.
    ``broken``: bool[rows], whose logits were not finite numbers, or whose traced prompt is none:
    nothing was drawn from these; the other rows go on.
    ``cache``: the texts but for their last tokens, and the buffer for the next rollout.
    """

    tokens: Array
    prompt_lengths: Array
    lengths: Array
    logprobs: Array
    drawn: Array
    ended: Array
    broken: Array
    cache: KVCache

    @property
    @allow_host_to_device
    def mask(self) -> Array:
        """Where new tokens stand in ``tokens``: bool[rows, prompt + new]."""
        at = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        return (at >= 0) & (at < self.lengths[:, None])

    @property
    @allow_host_to_device
    def new_tokens(self) -> Array:
        """int32[rows, new], 0 behind the last of a row."""
        new = self.logprobs.shape[1]
        at = self.prompt_lengths[:, None] + arange_row(new)
        found = jnp.take_along_axis(self.tokens, at, axis=1)
        return jnp.where(arange_row(new) < self.lengths[:, None], found, 0)

    @allow_host_to_device
    def beside(self, numbers: Array) -> Array:
        """Numbers of the new tokens, [rows, new], where these stand in ``tokens``: [rows, prompt +
        new], 0 elsewhere. So a trainer's pass over ``tokens`` is compared with ``drawn``."""
        at = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        found = jnp.take_along_axis(numbers, jnp.clip(at, 0, numbers.shape[1] - 1), axis=1)
        return jnp.where(self.mask, found, 0)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why each row ended, ``"eos"`` or ``"length"``; waits for the device."""
        return tuple("eos" if each else "length" for each in fetch(self.ended))

    def check(self) -> "Rollout":
        """The same; waits for the device.

        Raises:
          NonFiniteError: if a row's logits were not finite numbers, or its prompt, which was
            traced, has no length or a token that the model has not.
          ValueError: as ``kvjax.check`` of the cache.
        """
        broken = np.flatnonzero(fetch(self.broken))
        if broken.size:
            rows = ", ".join(map(str, broken))
            raise NonFiniteError(
                f"the logits of row(s) {rows} are not finite numbers, or their prompts no tokens"
            )
        check(self.cache)
        return self
