"""tunix: a ``BaseRollout`` that generates rollouts with kvjax."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import PyTree
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from kvjax.adapters.function_model import language_model
from kvjax.adapters.nnx import as_function
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array
from kvjax.generation.model import Model
from kvjax.policies.presets import PolicyChoice
from kvjax.rollouts.program import rollout
from kvjax.sampling.scores import take_tokens

__all__ = ["KvjaxRollout"]


class KvjaxRollout(base_rollout.BaseRollout):
    """A rollout worker for an NNX module.

    It reads the module's parameters at every call, so an update copies and compiles nothing. Use it
    as the rollout engine of a cluster:
    ``ClusterConfig(rollout_engine=functools.partial(KvjaxRollout, config=..., cache=...), ...)``.

    Example:
      ```python
      import functools
      from kvjax.adapters.tunix import KvjaxRollout
      from tunix.rl import rl_cluster

      engine = functools.partial(KvjaxRollout, config=model_config)
      cluster = rl_cluster.ClusterConfig(rollout_engine=engine, **cluster_settings)
      ```
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: object = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        config: object,
        cache: PolicyChoice = "static",
    ) -> None:
        """Create a rollout worker.

        Args:
          rollout_actor: a module for ``kvjax.adapters.nnx.as_function``. It is called with
            ``(tokens, cache, lengths)`` and returns logits and the cache. If its attention uses
            ``attention_fn``, it is called with tokens only and returns logits.
          tokenizer: a tunix tokenizer with ``encode``, ``decode``, ``bos_id``, ``eos_id`` and
            ``pad_id``.
          mesh: ignored, since parameters stay where the cluster has put them.
          rollout_config: ignored, since ``generate`` receives its own.
          config: the model's config, as for ``kvjax.language_model``.
          cache: a policy, or its name.
        """
        self.mesh, self._tokenizer, self._cache = None, tokenizer, cache
        self._actor, self._buffer = rollout_actor, None
        self._buffer_shape: tuple[int, ...] = ()
        self._calls = 0
        apply, params = as_function(rollout_actor)
        self._lm = language_model(apply, config, params, eos_token_ids=self.eos_id())

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: object
    ) -> base_rollout.RolloutOutput:
        """Sample a completion for each prompt.

        The result's ``logprobs`` refer to the distribution that the tokens were sampled from. Its
        ``logits`` are not set.

        Raises:
          ValueError: for a prompt of more than ``max_prompt_length`` tokens, or arguments that
            ``kvjax.rollout`` rejects.
        """
        options, width = rollout_config, rollout_config.max_prompt_length
        rows = [self._ids(prompt) for prompt in prompts]
        tokens = np.zeros((len(rows), width), np.int32)
        padded = np.full((len(rows), width), self.pad_id(), np.int32)
        for row, ids in enumerate(rows):
            if len(ids) > width:
                raise ValueError(
                    f"prompt {row} has {len(ids)} tokens, but max_prompt_length is {width}"
                )
            tokens[row, : len(ids)] = ids
            padded[row, width - len(ids) :] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        new = options.max_tokens_to_generate
        shape = len(rows), width, new
        buffer: KVCache | None = self._buffer if self._buffer_shape == shape else None
        self._buffer, self._calls = None, self._calls + 1
        result = rollout(
            self._lm,
            self._params(),
            (jnp.asarray(tokens), jnp.asarray(lengths)),
            max_new_tokens=new,
            cache=self._cache,
            buffer=buffer,
            seed=_seed(options.seed, self._calls),
            temperature=options.temperature,
            top_k=None if options.top_k in (None, -1) else options.top_k,
            top_p=options.top_p,
            eos_token_ids=options.eos_tokens,
        ).check()
        self._buffer, self._buffer_shape = result.cache, shape
        new_tokens, counts, logprobs = jax.device_get(
            (result.new_tokens, result.lengths, result.sampling_logprobs)
        )
        ids = [row[:count] for row, count in zip(new_tokens, counts, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in ids],
            logits=[],
            tokens=ids,
            left_padded_prompt_tokens=padded,
            logprobs=[row[:count] for row, count in zip(logprobs, counts, strict=True)]
            if options.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array, **kwargs: object
    ) -> jax.Array:
        """Compute log-probabilities of completions, float32[batch, new], in one pass without a
        cache.

        ``prompt_tokens`` is [batch, prompt], left-padded. ``completion_tokens`` is [batch, new].
        """
        return _logps(
            self._lm.architecture,
            self._params(),
            jnp.asarray(prompt_tokens),
            jnp.asarray(completion_tokens),
            jnp.int32(self.pad_id()),
        )

    def update_params(self, params: PyTree, filter_types: tuple[object, ...] | None = None) -> None:
        """Replace the actor's parameters. ``params`` is its whole state, or only the trainable
        part."""
        own = dict(nnx.to_flat_state(nnx.state(self._actor)))
        new = {}
        for path, leaf in nnx.to_flat_state(params):
            value = leaf[...] if hasattr(leaf, "get_value") else leaf
            old = own[path]
            new[path] = old.replace(jax.device_put(value, old[...].sharding).astype(old.dtype))
        nnx.update(self._actor, nnx.from_flat_state(list(new.items())))

    def pad_id(self) -> int:
        """Return the id of the tokenizer's padding token."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """Return the id of the tokenizer's end token."""
        return int(self._tokenizer.eos_id())

    def model(self) -> nnx.Module:
        """Return the actor, an NNX module."""
        return self._actor

    def _params(self) -> PyTree:
        return nnx.split(self._actor)[1]

    def _ids(self, prompt: str) -> list[int]:
        begin: Sequence[int] = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        ids = [*begin, *self._tokenizer.encode(prompt)]
        deduplicate = getattr(self._tokenizer, "dedup_bos_ids", None)
        return ids if deduplicate is None else list(deduplicate(ids))


def _seed(seed: int | Array | None, calls: int) -> int | Array:
    """Return a seed from an integer or a JAX key. Without either, return the number of the call."""
    if seed is None:
        return calls
    if isinstance(seed, jax.Array):
        words = seed if jnp.issubdtype(seed.dtype, jnp.integer) else jax.random.key_data(seed)
        return words.ravel()[-1].astype(jnp.uint32)
    return int(seed)


@functools.partial(jax.jit, static_argnames="model")
def _logps(model: Model, params: PyTree, prompts: Array, completions: Array, pad: Array) -> Array:
    """Compute the log-probabilities of completions, float32[batch, new].

    Rows are shifted so that each starts with its first real token.
    """
    real, (width, new) = prompts != pad, (prompts.shape[1], completions.shape[1])
    padding = jnp.where(jnp.any(real, axis=1), jnp.argmax(real, axis=1), width).astype(jnp.int32)
    tokens = jnp.concatenate([prompts, completions], axis=1)
    shifted = (arange_row(width + new) + padding[:, None]) % (width + new)
    logits = model.apply(params, jnp.take_along_axis(tokens, shifted, axis=1))
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    at = (width - padding)[:, None] + arange_row(new) - 1
    return take_tokens(jnp.take_along_axis(logprobs, at[..., None], axis=1), completions)
