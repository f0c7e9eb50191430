"""Policies and pool sizes of an engine."""

from collections.abc import Sequence
from dataclasses import replace

from kvjax.core.validation import INT32_MAX, as_int
from kvjax.engine.drafts import MAX_DRAFT_TOKENS
from kvjax.generation.loaded_model import LanguageModel
from kvjax.layouts import as_paged
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.sizes import device_bytes
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, per_layer
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config

DEFAULT_ROWS = 8
"""Rows of an engine whose limits have no ``max_batch_size``."""
DEFAULT_MEMORY_RATIO = 0.9
"""Largest share of the device memory beside the weights that pools take by default."""


def engine_pool_config(
    lm: LanguageModel,
    policy: PolicyChoice,
    limits: InferenceLimits,
    pages: int | None,
    memory: int | str | None,
    prefill_chunk: int,
    rounds: int,
    exact: bool,
    checkpoint_every: int,
    draft_bytes: int,
    rotary_len: int | None = None,
) -> PoolConfig:
    """The pools for these arguments of ``Engine``. If they give no size, pools hold all rows at
    full length, or as much as fits next to the weights and a draft model's ``draft_bytes``.

    Raises:
      ValueError: as ``Engine``.
    """
    chunk = as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX)
    longest_write = max(chunk, rounds, 1 + MAX_DRAFT_TOKENS)
    policies = with_window_slack(per_layer(policy, lm.config), longest_write - 1)

    def config(pages: int | None, memory: int | str | None) -> PoolConfig:
        return make_pool_config(
            lm,
            policies,
            pages,
            memory,
            limits.max_seq_len,
            chunk,
            exact,
            checkpoint_every,
            rotary_len,
        )

    rows = limits.max_batch_size or DEFAULT_ROWS
    layouts = [as_paged(policy.layout) for policy in policies]
    sized = any(layout is not None and layout.pages for layout in layouts)
    if pages is not None or memory is not None or sized:
        return config(pages, memory)
    smallest = config(1, None)
    if limits.cache_memory_ratio is None:
        full = config(rows * max_pages_per_row(smallest), None)
        limits = replace(limits, cache_memory_ratio=DEFAULT_MEMORY_RATIO)
        try:
            available = _available(lm, limits, rows, smallest.max_len, draft_bytes)
        except ValueError:  # the device does not report its memory
            return full
        needed = device_bytes(lm.config, list(full.policies), rows, full.max_len, lm.mesh)
        if available is None or needed <= available:
            return full
    available = _available(lm, limits, rows, smallest.max_len, draft_bytes)
    row_bytes = rows * smallest.checkpoint_bytes
    if available is None or available <= row_bytes:
        raise ValueError(
            f"cache_memory_ratio={limits.cache_memory_ratio} leaves {available} bytes for the "
            f"cache, but {rows} rows take {row_bytes} bytes without pages: raise it, or lower "
            "max_batch_size"
        )
    return config(None, available - row_bytes)


def max_pages_per_row(config: PoolConfig) -> int:
    """Maximum number of pages of one pool that a row uses."""
    return max(group.page_group.layout.columns for group in config.groups)


def max_sequence_length(lm: LanguageModel, limits: InferenceLimits) -> int:
    """Maximum number of tokens of a request, prompt and new tokens together.

    Raises:
      ValueError: if neither ``limits`` nor the model has a limit.
    """
    length = limits.max_seq_len or position_limit(lm.config)
    if length is None:
        raise ValueError("this model has no maximum length: give limits=InferenceLimits(max_seq_len=...)")
    return length


def with_window_slack(policies: Sequence[CachePolicy], slack: int) -> list[CachePolicy]:
    """The policies, with paged windows that keep at least ``slack`` tokens more, so that a program
    can write a whole chunk at once."""
    widened = []
    for policy in policies:
        layout = as_paged(policy.layout)
        if layout is not None:
            policy = replace(policy, layout=layout.with_slack(slack))
        widened.append(policy)
    return widened


def _available(
    lm: LanguageModel, limits: InferenceLimits, rows: int, max_len: int, draft_bytes: int
) -> int | None:
    allowed = limits.allowed(lm, batch=rows, capacity=max_len)
    return None if allowed is None else max(allowed - draft_bytes, 0)
