"""What a rollout is asked for: its prompts as arrays, and how tokens are drawn."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.validation import UNLIMITED, as_int, is_traced
from kvjax.generation.inputs import (
    check_token_ids,
    parse_eos_token_ids,
    parse_logit_bias,
    tokenize_prompts,
)
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import SamplingKeywords
from kvjax.policies.model_config import position_limit, positions_needed, same_rotary
from kvjax.sampling.params import Filters, SamplingArrays, prepare_sampling


class RolloutSettings(SamplingKeywords, total=False):
    """How tokens are drawn, and what else is compiled in."""

    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Any
    min_new_tokens: int
    eos_token_ids: Any
    logits_hook: Any


def prompt_arrays(lm: LanguageModel, prompts: Any, new: int) -> tuple[Any, Any]:
    """Prompts as int32[batch, prompt] and int32[batch].

    Raises:
      ValueError: if they are none.
    """
    if not (isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2):
        rows = tokenize_prompts(lm, prompts, [])
        width = longest = max(map(len, rows))
        if same_rotary(lm.config, 1, UNLIMITED):  # padding would change frequencies of a length
            width = max(16, 1 << (longest - 1).bit_length())
            most = (position_limit(lm.config) or UNLIMITED) - positions_needed(0, new)
            width = max(longest, min(width, most))
        tokens = np.zeros((len(rows), width), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return tokens, np.array([len(ids) for ids in rows], np.int32)
    tokens, lengths = prompts
    if np.shape(lengths) != np.shape(tokens)[:1]:
        raise ValueError(
            f"prompts are tokens [batch, prompt] and lengths [batch], got {list(np.shape(tokens))} "
            f"and {list(np.shape(lengths))}"
        )
    for name, each in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(jnp.result_type(each), jnp.integer):
            raise ValueError(f"{name} of prompts are whole numbers, got {jnp.result_type(each)}")
    if not any(map(is_traced, (tokens, lengths))):
        known = zip(np.asarray(tokens), np.asarray(lengths), strict=True)
        for row, (ids, real) in enumerate(known):
            if not 1 <= real <= len(ids):
                raise ValueError(f"prompt {row} has {real} tokens, and must have 1 to {len(ids)}")
            check_token_ids(lm.config, ids[:real].tolist(), f"prompt {row}")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def drawing_of(
    lm: LanguageModel, rows: int, new: int, seed: Any, settings: RolloutSettings
) -> tuple[Filters, SamplingArrays]:
    """How tokens are drawn, with a seed that may be traced."""
    given: dict[str, Any] = {"temperature": 1.0, **settings}
    least = as_int("min_new_tokens", given.pop("min_new_tokens", 0), 0)
    if least > new:
        raise ValueError(f"min_new_tokens is {least}, but max_new_tokens only {new}")
    ends = parse_eos_token_ids(lm, given.pop("eos_token_ids", None))
    bias = parse_logit_bias(lm.config, given.pop("logit_bias", None))
    filters, found = prepare_sampling(
        seeds=range(rows), eos_token_ids=ends, min_new_tokens=least, logit_bias=bias, **given
    )
    filters = replace(filters, mesh=lm.mesh is not None)
    if not is_traced(seed) and not isinstance(seed, jax.Array):
        seed = np.uint32(_below(seed))
    high = jnp.broadcast_to(jnp.asarray(seed).astype(jnp.uint32), (rows,))
    return filters, replace(found, seeds=jnp.stack([jnp.asarray(found.seeds[:, 0]), high], axis=1))


def _below(seed: Any) -> int:
    """A seed, or a ``ValueError``."""
    if as_int("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}, and must be below 2**32")
    return int(seed)
