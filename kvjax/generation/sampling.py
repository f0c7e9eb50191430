"""Logits to tokens: the filters of Transformers, in its order, and one draw a row.

The order is bias, repetition penalty, ``min_new_tokens``, what is allowed; then, where tokens are
drawn, temperature, top-k, top-p, min-p.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt

from kvjax.core.checks import is_traced
from kvjax.core.trees import state
from kvjax.core.typing import Rows, SomeRows
from kvjax.generation.filters import (
    EVERY,
    Allowed,
    Logits,
    Seen,
    biased,
    keep_allowed,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalize,
)

NO_TOKEN = np.int32(2**31 - 1)
_TINY = float(np.finfo(np.float32).tiny)
_RANGES = {
    "temperature": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "top_k": ("a whole number, at least 1", lambda x: 1 <= x < 2**64 and x == int(x)),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    # Beyond this, finite logits might not stay finite.
    "repetition_penalty": ("from 1e-6 to 1e6", lambda x: 1e-6 <= x <= 1e6),
    "logit_bias": ("numbers from -1e6 to 1e6", lambda x: -1e6 <= x <= 1e6),
    "seed": ("a whole number from 0 to 2**64 - 1", lambda x: 0 <= x < 2**64 and x == int(x)),
}


@dataclass(frozen=True)
class Filters:
    """Which steps of ``sample`` there are: compiled in, hashable, as a static argument of ``jit``;
    or taken as the program runs, where they are traced (``Sampling.filters``)."""

    greedy: bool | Array = True
    top_k: bool | Array = False
    top_p: bool | Array = False
    min_p: bool | Array = False
    repetition_penalty: bool | Array = False
    min_new_tokens: bool | Array = False
    bias: bool | Array = False


@state
class Sampling:
    """The numbers of ``sample``, traced, so that a new value compiles nothing: [batch] each, one a
    row. A row that a filter is not for has a number with which it changes nothing.

    ``seeds``: uint32[batch, 2], low and high word. ``eos``: int32[batch, n], padded with a number
    that is no token's. ``biased``, ``bias``: int32 and float32[batch, m], tokens, padded so, and
    what is added to their logits.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    min_new_tokens: Array
    seeds: Array
    eos: Array
    biased: Array
    bias: Array

    @property
    def filters(self) -> Filters:
        """Those that some row needs, as truth values."""
        return Filters(
            greedy=jnp.all(self.temperature == 0),
            top_k=jnp.any(self.top_k < NO_TOKEN),
            top_p=jnp.any(self.top_p < 1),
            min_p=jnp.any(self.min_p > 0),
            repetition_penalty=jnp.any(self.repetition_penalty != 1),
            min_new_tokens=jnp.any(self.min_new_tokens > 0),
            bias=jnp.any(self.biased < NO_TOKEN),
        )


def make_settings(
    *,
    seeds: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    min_new_tokens: int = 0,
    eos_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
) -> tuple[Filters, Sampling]:
    """What ``sample`` needs, from the numbers as a user gives them.

    Args:
      seeds: one a row.
      temperature: 0 is greedy: the likeliest token, whatever ``top_k``, ``top_p``, ``min_p`` say.
      top_k: draw among the k likeliest tokens.
      top_p: draw among the fewest likeliest tokens that hold this share of the probability.
      min_p: draw among tokens at least this share as likely as the likeliest.
      repetition_penalty: above 1 makes tokens that the row has already less likely.
      min_new_tokens: none of ``eos_token_ids`` before a row has so many new tokens.
      logit_bias: numbers that are added to the logits of tokens.

    Raises:
      ValueError: naming the value that is out of its range, and the range.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"repetition_penalty": repetition_penalty}
    bias = dict(logit_bias or {})
    every = [*given.items(), *(("seed", seed) for seed in seeds)]
    for name, value in [*every, *(("logit_bias", each) for each in bias.values())]:
        limits, fits = _RANGES[name]
        optional = name not in ("temperature", "seed", "logit_bias")
        try:
            fine = (value is None and optional) or fits(value)
        except TypeError:
            fine = False
        if not fine:
            raise ValueError(f"{name} must be {limits}, got {value!r}")
    # A temperature that processors may round to nothing is the limit: greedy.
    greedy = temperature < _TINY
    ends = list(eos_token_ids)
    least = min(min_new_tokens, int(NO_TOKEN)) if ends else 0
    if greedy:
        top_k = top_p = min_p = None
    filters = Filters(
        greedy=greedy,
        top_k=top_k is not None,
        top_p=top_p is not None and top_p < 1,
        min_p=min_p is not None and min_p > 0,
        repetition_penalty=repetition_penalty not in (None, 1),
        min_new_tokens=least > 0,
        bias=bool(bias),
    )
    words = [(int(seed) & 0xFFFFFFFF, int(seed) >> 32) for seed in seeds]
    numbers: dict[str, Any] = {
        "temperature": np.float32(0 if greedy else temperature),
        "top_k": np.int32(min(top_k or NO_TOKEN, int(NO_TOKEN))),
        # Sums of probabilities may come to more than 1.
        "top_p": np.float32(max(top_p or 1, _TINY) if filters.top_p else 2),
        "min_p": np.float32(min_p or 0),
        "repetition_penalty": np.float32(repetition_penalty or 1),
        "min_new_tokens": np.int32(least),
        "eos": _padded(ends, 8),
        "biased": _padded(list(bias), 8 if bias else 0),
        "bias": _padded(list(bias.values()), 8 if bias else 0, np.float32(0)),
    }
    # Of the host, until jit takes them.
    rows: Any = {name: np.stack([x] * len(words)) for name, x in numbers.items()}
    rows["seeds"] = np.asarray(words, np.uint32).reshape(-1, 2)
    return filters, Sampling(**rows)


def _padded(numbers: Sequence[Any], least: int, fill: Any = NO_TOKEN) -> np.ndarray:
    """As many as a power of two, so that few programs are ever compiled."""
    more = max(least, 1 << len(numbers).bit_length()) if least else 0
    return np.array([*numbers, *[fill] * (more - len(numbers))], fill.dtype)


def sample(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    seen: Seen | None = None,
    allowed: Allowed | None = None,
) -> tuple[Rows, SomeRows]:
    """Choose each row's next token, and say whether its logits were finite numbers; where they
    were not, the token means nothing.

    Args:
      logits, filters, settings: the last two as ``make_settings`` gives them.
      count: new tokens of each row so far: with its seed, all its draw depends on.
      seen: tokens that stand in a row; for the repetition penalty.
      allowed: bits of those that may be chosen; by default all.
    """
    logits = logits.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    logits = _changed(logits, filters, settings, count, seen, allowed)

    def likeliest(logits: Logits) -> Rows:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn(logits: Logits) -> Rows:
        token = draw(_narrowed(logits, filters, settings), settings.seeds, count)
        if not is_traced(filters.greedy):
            return token
        return jnp.where(settings.temperature > 0, token, likeliest(logits))

    return _either(filters.greedy, likeliest, drawn, logits), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    seen: Seen | None = None,
    allowed: Allowed | None = None,
) -> Logits:
    """The logits that ``sample``, with the same arguments, draws from; where it is greedy, the
    largest of them is its token. What can't be drawn is at minus infinity."""
    logits = _changed(logits, filters, settings, count, seen, allowed)
    return _either(filters.greedy, lambda x: x, lambda x: _narrowed(x, filters, settings), logits)


def _changed(
    logits: Logits, filters: Filters, settings: Sampling, count: Rows, seen: Seen | None,
    allowed: Allowed | None,
) -> Logits:  # fmt: skip
    """With what changes the likeliest token too."""

    def bias(logits: Logits) -> Logits:
        return biased(logits, settings.biased, settings.bias)

    def penalty(logits: Logits) -> Logits:
        assert seen is not None
        return penalize(logits, seen, settings.repetition_penalty)

    def no_end(logits: Logits) -> Logits:
        early = (count < settings.min_new_tokens)[:, None]
        rows = jnp.arange(logits.shape[0])[:, None]
        masked = logits.at[rows, settings.eos].set(-jnp.inf, mode="drop")
        return jnp.where(early, masked, logits)

    logits = _where(filters.bias, bias, logits)
    logits = _where(filters.repetition_penalty, penalty, logits)
    logits = _where(filters.min_new_tokens, no_end, logits)
    if allowed is None:
        return logits
    guided = jnp.any(allowed != EVERY)
    return _where(guided, lambda x: keep_allowed(x, allowed), logits)


def _narrowed(logits: Logits, filters: Filters, settings: Sampling) -> Logits:
    """With what else tokens that are drawn are subject to."""
    # The largest is moved to 0 first, so that no temperature can make it overflow.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    warm = settings.temperature > 0
    logits = (logits - largest) / jnp.where(warm, settings.temperature, 1)[:, None]
    logits = _where(filters.top_k, lambda x: keep_top_k(x, settings.top_k), logits)
    logits = _where(filters.top_p, lambda x: keep_top_p(x, settings.top_p), logits)
    return _where(filters.min_p, lambda x: keep_min_p(x, settings.min_p), logits)


def _where(needed: bool | Array, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """``change``, if it is needed."""
    return _either(needed, change, lambda x: x, logits)


def _either(which: bool | Array, one: Callable[..., Any], other: Callable[..., Any], x: Any) -> Any:
    """One of two ways to take: as the program is compiled, or as it runs."""
    if is_traced(which):
        return lax.cond(which, one, other, x)
    return one(x) if which else other(x)


def draw(logits: Logits, seeds: UInt[Array, "batch 2"], count: Rows) -> Rows:
    """Draw one token a row, in proportion to ``exp(logits)``; never one at minus infinity.

    Equal ``seeds`` (low and high word) and ``count``, the row's how-manieth draw this is, draw
    equally, in any batch and on any platform.
    """

    def noise(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
        return jax.random.gumbel(jax.random.fold_in(key, count), logits.shape[-1:], jnp.float32)

    return jnp.argmax(logits + jax.vmap(noise)(seeds, count), axis=-1).astype(jnp.int32)
