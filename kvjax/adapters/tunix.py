"""tunix: rollouts of its reinforcement learning by kvjax, as a ``BaseRollout``."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from kvjax.adapters.language_model import language_model
from kvjax.adapters.nnx import as_function
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array
from kvjax.policies.presets import PolicyChoice
from kvjax.rollouts.program import rollout
from kvjax.sampling.scores import take_tokens

__all__ = ["KvjaxRollout"]


class KvjaxRollout(base_rollout.BaseRollout):
    """A rollout worker of an NNX module, whose parameters it reads anew each time: an update copies
    nothing and compiles nothing.

    As a cluster's engine: ``ClusterConfig(rollout_engine=functools.partial(KvjaxRollout,
    config=..., cache=...), ...)``.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: base_rollout.RolloutConfig | None = None,
        *,
        config: Any,
        cache: PolicyChoice = "static",
    ) -> None:
        """Make one.

        Args:
          rollout_actor: as ``kvjax.adapters.nnx.as_function`` takes it: its call takes ``(tokens,
            cache, lengths)`` and gives logits and the cache, or tokens alone, with attention of
            ``attention_fn``.
          tokenizer: of tunix, with ``encode``, ``decode``, ``bos_id``, ``eos_id``, ``pad_id``.
          mesh: of the cluster; parameters stay where it has put them.
          rollout_config: not looked at here: ``generate`` is given one.
          config: the model's numbers, as of ``kvjax.language_model``.
          cache: a policy, or its name.
        """
        self.mesh, self._tokenizer, self._cache = None, tokenizer, cache
        self._actor, self._buffer = rollout_actor, None
        self._held: tuple[int, ...] = ()
        self._calls = 0
        apply, params = as_function(rollout_actor)
        self._lm = language_model(apply, config, params, eos_token_ids=self.eos_id())

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        """Draw a continuation of each prompt. Its ``logprobs`` are of the distribution that tokens
        were drawn from; there are no ``logits``.

        Raises:
          ValueError: for a prompt of more than ``max_prompt_length`` tokens, or arguments that
            ``kvjax.rollout`` refuses.
        """
        wanted, width = rollout_config, rollout_config.max_prompt_length
        rows = [self._ids(prompt) for prompt in prompts]
        tokens = np.zeros((len(rows), width), np.int32)
        padded = np.full((len(rows), width), self.pad_id(), np.int32)
        for row, ids in enumerate(rows):
            if len(ids) > width:
                raise ValueError(
                    f"prompt {row} has {len(ids)} tokens, and max_prompt_length is {width}"
                )
            tokens[row, : len(ids)] = ids
            padded[row, width - len(ids) :] = ids
        lengths = np.array([len(ids) for ids in rows], np.int32)
        new, given = wanted.max_tokens_to_generate, (jnp.asarray(tokens), jnp.asarray(lengths))
        shape = len(rows), width, new
        buffer: KVCache | None = self._buffer if self._held == shape else None
        self._buffer, self._calls = None, self._calls + 1
        found = rollout(
            self._lm, self._params(), given, max_new_tokens=new, cache=self._cache,
            buffer=buffer, seed=_seed(wanted.seed, self._calls), temperature=wanted.temperature,
            top_k=None if wanted.top_k in (None, -1) else wanted.top_k, top_p=wanted.top_p,
            eos_token_ids=wanted.eos_tokens,
        ).check()  # fmt: skip
        self._buffer, self._held = found.cache, shape
        every, real, drawn = jax.device_get((found.new_tokens, found.lengths, found.drawn))
        ids = [row[:count] for row, count in zip(every, real, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(row.tolist()) for row in ids],
            logits=[],
            tokens=ids,
            left_padded_prompt_tokens=padded,
            logprobs=[row[:count] for row, count in zip(drawn, real, strict=True)]
            if wanted.return_logprobs
            else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: jax.Array, completion_tokens: jax.Array, **kwargs: Any
    ) -> jax.Array:
        """Log-probabilities of completions [batch, new] behind prompts [batch, prompt], padded on
        the left, by one pass without a cache: float32[batch, new]."""
        return _logps(
            self._lm.architecture, self._params(), jnp.asarray(prompt_tokens),
            jnp.asarray(completion_tokens), jnp.int32(self.pad_id()),
        )  # fmt: skip

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Take new parameters: a state of the actor, or of those that training changes."""
        own = dict(nnx.to_flat_state(nnx.state(self._actor)))
        new = {}
        for path, leaf in nnx.to_flat_state(params):
            value = leaf[...] if hasattr(leaf, "get_value") else leaf
            held = own[path]
            new[path] = held.replace(jax.device_put(value, held[...].sharding).astype(held.dtype))
        nnx.update(self._actor, nnx.from_flat_state(list(new.items())))

    def pad_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The tokenizer's."""
        return int(self._tokenizer.eos_id())

    def model(self) -> nnx.Module:
        """The actor."""
        return self._actor

    def _params(self) -> Any:
        return nnx.split(self._actor)[1]

    def _ids(self, prompt: str) -> list[int]:
        begin: Sequence[int] = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        ids = [*begin, *self._tokenizer.encode(prompt)]
        once = getattr(self._tokenizer, "dedup_bos_ids", None)
        return ids if once is None else list(once(ids))


def _seed(given: Any, calls: int) -> Any:
    """A seed, of a number or a key; where there is none, another one each time."""
    if given is None:
        return calls
    if isinstance(given, jax.Array):
        words = given if jnp.issubdtype(given.dtype, jnp.integer) else jax.random.key_data(given)
        return words.ravel()[-1].astype(jnp.uint32)
    return int(given)


@functools.partial(jax.jit, static_argnames="model")
def _logps(model: Any, params: Any, prompts: Array, completions: Array, pad: Array) -> Array:
    """float32[batch, new]: rows are read from their first real token on."""
    real, (width, new) = prompts != pad, (prompts.shape[1], completions.shape[1])
    before = jnp.where(jnp.any(real, axis=1), jnp.argmax(real, axis=1), width).astype(jnp.int32)
    every = jnp.concatenate([prompts, completions], axis=1)
    at = (arange_row(width + new) + before[:, None]) % (width + new)
    logits = model.apply(params, jnp.take_along_axis(every, at, axis=1))
    known = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    behind = (width - before)[:, None] + arange_row(new) - 1
    return take_tokens(jnp.take_along_axis(known, behind[..., None], axis=1), completions)
