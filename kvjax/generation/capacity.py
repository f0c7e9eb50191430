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
    """Tokens a row that a cache can ever hold."""
    return cache.max_len if cache.grows_to is None else cache.grows_to


def grown_capacity(cache: KVCache, tokens: int) -> int:
    """What a cache is grown to for so many tokens a row."""
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
    """For prompts of at most ``longest`` tokens and ``limit`` ``new`` ones, with a cache that was
    given or without one; ``rounded``: up, though rotary frequencies depend on the length.

    Raises:
      ValueError: if that is more than ``max_len``, the model's positions, or the cache given hold.
    """
    need, positions = positions_needed(longest, limit), position_limit(config)
    asked = f"{longest} tokens of prompt and {new}{limit} need {need} positions"
    if positions is not None and need > positions:
        raise ValueError(f"{asked}, but the model has only {positions}")
    if given is not None:
        holds = max_capacity(given)
        if max_len not in (None, holds):
            raise ValueError(f"max_len is {max_len}, but the cache given holds {holds}")
        if need > holds:
            raise ValueError(
                f"{asked}, but the cache given holds {holds}: kvjax.grow(cache, {need}) makes room"
            )
        max_len = holds
    if max_len is None:
        bucket = capacity_bucket(need)
        # Rounding up must not change the frequencies of a length-dependent rotary kind.
        if not rounded and not same_rotary(config, need, bucket):
            return need
        return bucket if positions is None else min(bucket, positions)
    max_len = as_int("max_len", max_len, 1)
    if positions is not None and positions < max_len < UNLIMITED:
        raise ValueError(f"max_len is {max_len}, but the model has only {positions} positions")
    if need > max_len:
        raise ValueError(f"{asked}, but max_len is {max_len}")
    return max_len
