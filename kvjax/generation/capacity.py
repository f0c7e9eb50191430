"""How many tokens per row a request's cache is allocated for."""

from kvjax.cache.state import KVCache
from kvjax.core.validation import as_int
from kvjax.generation.model import ModelConfig
from kvjax.layouts import UNLIMITED
from kvjax.policies.model_config import position_limit, positions_needed, same_rotary

_SMALLEST_CAPACITY = 64


def capacity_bucket(tokens: int) -> int:
    """The smallest capacity 2**k or 3 * 2**k, from 64 up, that holds ``tokens``."""
    power = max(_SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
    between = power // 4 * 3
    return between if between >= max(tokens, _SMALLEST_CAPACITY) else power


def max_capacity(cache: KVCache) -> int:
    """Tokens per row that a cache can hold after it has grown."""
    return cache.max_len if cache.grows_to is None else cache.grows_to


def grown_capacity(cache: KVCache, tokens: int) -> int:
    """The capacity that a cache grows to in order to hold ``tokens`` per row."""
    return min(capacity_bucket(tokens), max_capacity(cache))


def choose_capacity(
    config: ModelConfig,
    longest: int,
    limit: int,
    max_len: int | None,
    given: KVCache | None,
    *,
    new: str = "max_new_tokens=",
    rounded: bool = False,
) -> int:
    """The capacity in tokens per row for a prompt of ``longest`` tokens and ``limit`` new ones.

    Args:
      config: the model's.
      longest, limit: tokens of the longest prompt, and the most new tokens.
      max_len: as the user gave it, or None.
      given: the cache to continue, or None.
      new: how error messages introduce ``limit``.
      rounded: round the capacity up even if rotary frequencies depend on it.

    Raises:
      ValueError: if ``max_len``, the model's positions or the given cache are too few.
    """
    need, positions = positions_needed(longest, limit), position_limit(config)
    required = f"{longest} tokens of prompt and {new}{limit} need {need} positions"
    if positions is not None and need > positions:
        raise ValueError(f"{required}, but the model has only {positions}")
    if given is not None:
        most = max_capacity(given)
        if max_len not in (None, most):
            raise ValueError(f"max_len is {max_len}, but the given cache holds {most}")
        if need > most:
            raise ValueError(
                f"{required}, but the given cache holds {most}: call kvjax.grow(cache, {need})"
            )
        max_len = most
    if max_len is None:
        bucket = capacity_bucket(need)
        # Rounding must not change the frequencies of length-dependent rotary embeddings.
        if not rounded and not same_rotary(config, need, bucket):
            return need
        return bucket if positions is None else min(bucket, positions)
    max_len = as_int("max_len", max_len, 1)
    if positions is not None and positions < max_len < UNLIMITED:
        raise ValueError(f"max_len is {max_len}, but the model has only {positions} positions")
    if need > max_len:
        raise ValueError(f"{required}, but max_len is {max_len}")
    return max_len
