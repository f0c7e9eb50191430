"""``Rollout``: the result of a rollout, as arrays of fixed shapes."""

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import check
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.core.validation import NonFiniteError


@pytree_dataclass
class Rollout:
    """Sampled continuations, one row each. The ``n`` rows of a prompt are consecutive.

    Attributes:
      tokens: int32[rows, prompt + new], the prompt of each row, directly followed by its new tokens
        and then by padding.
      prompt_lengths: int32[rows], the number of prompt tokens.
      lengths: int32[rows], the number of new tokens.
      logprobs: float32[rows, new], the log-probability of each new token in the model's
        distribution, before temperature and filters; 0 after a row's last token.
      sampling_logprobs: float32[rows, new], the same in the distribution from which the token was
        sampled, after temperature and filters.
      ended: bool[rows], whether a row ended with an end token. Otherwise it reached its limit.
      broken: bool[rows], whether a row has logits that are not finite, or an invalid traced prompt.
        Nothing was sampled from such logits, and other rows are not affected.
      cache: the cache with all tokens of each row except the last. Pass it as ``buffer`` to the
        next rollout.

    Example:
      ```python
      rollout = kvjax.rollout(lm, lm.params, ["The json module"], n=2, max_new_tokens=8).check()
      trainer_positions = rollout.align(rollout.sampling_logprobs)
      print(rollout.mask.shape == trainer_positions.shape, rollout.finish_reasons)
      ```
    """

    tokens: Array
    prompt_lengths: Array
    lengths: Array
    logprobs: Array
    sampling_logprobs: Array
    ended: Array
    broken: Array
    cache: KVCache

    @property
    @allow_host_to_device
    def mask(self) -> Array:
        """A mask, bool[rows, prompt + new], that is True at the positions of new tokens in
        ``tokens``."""
        index = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        return (index >= 0) & (index < self.lengths[:, None])

    @property
    @allow_host_to_device
    def new_tokens(self) -> Array:
        """The new tokens of each row, int32[rows, new], and 0 after the row's last token."""
        new = self.logprobs.shape[1]
        at = self.prompt_lengths[:, None] + arange_row(new)
        tokens = jnp.take_along_axis(self.tokens, at, axis=1)
        return jnp.where(arange_row(new) < self.lengths[:, None], tokens, 0)

    @allow_host_to_device
    def align(self, numbers: Array) -> Array:
        """Move values of new tokens, [rows, new], to the positions of these tokens in ``tokens``.
        Returns [rows, prompt + new], with 0 at other positions. Use it to compare
        ``sampling_logprobs`` with the log-probabilities that a training step computes for
        ``tokens``."""
        index = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        index = jnp.clip(index, 0, numbers.shape[1] - 1)
        return jnp.where(self.mask, jnp.take_along_axis(numbers, index, axis=1), 0)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Why each row ended, ``"eos"`` or ``"length"``. Reading this waits for the device."""
        return tuple("eos" if ended else "length" for ended in fetch(self.ended))

    def check(self) -> "Rollout":
        """Raise the errors that a compiled program can't raise, and return the rollout. This waits
        for the device.

        Raises:
          NonFiniteError: if a row has logits that are not finite, or a traced prompt without tokens
            or with tokens outside of the vocabulary.
          ValueError: for the same reasons as ``kvjax.check`` of the cache.
        """
        broken = np.flatnonzero(fetch(self.broken))
        if broken.size:
            rows = ", ".join(map(str, broken))
            raise NonFiniteError(
                f"row(s) {rows} have logits that are not finite, or prompts that are not valid"
            )
        check(self.cache)
        return self
