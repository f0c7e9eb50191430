"""``Rollout``: the result of a rollout, in arrays of fixed shapes."""

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

    ``tokens``: int32[rows, prompt + new], each row's prompt, its new tokens directly after it, then
    padding; ``prompt_lengths``, ``lengths``: int32[rows], the number of prompt and of new tokens.
    ``logprobs``: float32[rows, new], the log-probability of each new token in the model's own
    distribution; ``sampling_logprobs``: in the distribution that it was sampled from, after
    temperature and filters; both 0 after a row's last token. ``ended``: bool[rows], rows that end
    with an end token; the others reached their limit. ``broken``: bool[rows], rows with logits that
    are not finite, or with an invalid traced prompt; nothing was sampled from these logits, and
    other rows are not affected. ``cache``: holds all tokens of each row but the last. Pass it as
    ``buffer`` to the next rollout.

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
        """bool[rows, prompt + new], the positions of new tokens in ``tokens``."""
        index = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        return (index >= 0) & (index < self.lengths[:, None])

    @property
    @allow_host_to_device
    def new_tokens(self) -> Array:
        """int32[rows, new], the new tokens, 0 after the last of a row."""
        new = self.logprobs.shape[1]
        at = self.prompt_lengths[:, None] + arange_row(new)
        tokens = jnp.take_along_axis(self.tokens, at, axis=1)
        return jnp.where(arange_row(new) < self.lengths[:, None], tokens, 0)

    @allow_host_to_device
    def align(self, numbers: Array) -> Array:
        """Move values of new tokens, [rows, new], to the positions of these tokens in ``tokens``:
        [rows, prompt + new], 0 elsewhere. So ``sampling_logprobs`` can be compared with the
        log-probabilities that a training step computes for ``tokens``."""
        index = arange_row(self.tokens.shape[1]) - self.prompt_lengths[:, None]
        index = jnp.clip(index, 0, numbers.shape[1] - 1)
        return jnp.where(self.mask, jnp.take_along_axis(numbers, index, axis=1), 0)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Why each row ended, ``"eos"`` or ``"length"``. Waits for the device."""
        return tuple("eos" if ended else "length" for ended in fetch(self.ended))

    def check(self) -> "Rollout":
        """Raise errors that a program can't raise, and return the rollout. Waits for the device.

        Raises:
          NonFiniteError: if a row has logits that are not finite, or a traced prompt without tokens
            or with tokens outside of the vocabulary.
          ValueError: as ``kvjax.check`` for the cache.
        """
        broken = np.flatnonzero(fetch(self.broken))
        if broken.size:
            rows = ", ".join(map(str, broken))
            raise NonFiniteError(
                f"row(s) {rows} have logits that are not finite, or prompts that are not valid"
            )
        check(self.cache)
        return self
