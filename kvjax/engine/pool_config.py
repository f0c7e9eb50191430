"""What an engine's rows have in common: policies, pages, and the grid of positions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvjax.core.validation import INT32_MAX, as_int
from kvjax.engine.drafts import MAX_DRAFT_TOKENS
from kvjax.generation.loaded_model import LanguageModel
from kvjax.layouts import paged
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.sizes import device_bytes
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, per_layer
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config

DEFAULT_ROWS = 8
"""Where limits name none."""
DEFAULT_RATIO = 0.9
"""Of what weights leave of a device, what pools take at most, where nothing else is said."""


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
    beside: int,
    rotary_len: int | None = None,
) -> PoolConfig:
    """The terms of an engine, by its arguments; see ``Engine``. ``beside``: bytes of the device
    that a draft takes.

    Raises:
      ValueError: as it says.
    """
    chunk = as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX)
    policies = with_slack(
        per_layer(policy, lm.config), max(chunk, rounds, 1 + MAX_DRAFT_TOKENS) - 1
    )

    def terms(pages: int | None, memory: int | str | None) -> PoolConfig:
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
    named = any(layout.pages for each in policies if (layout := paged(each.layout)) is not None)
    if pages is not None or memory is not None or named:
        return terms(pages, memory)
    least = terms(1, None)
    if limits.cache_memory_ratio is None:
        needed = terms(rows * max(kind.page_group.layout.columns for kind in least.groups), None)
        limits = replace(limits, cache_memory_ratio=DEFAULT_RATIO)
        try:
            allowed = _allowed(lm, limits, rows, least.max_len, beside)
        except ValueError:  # the device does not say how much it has
            return needed
        taken = device_bytes(lm.config, list(needed.policies), rows, needed.max_len, lm.mesh)
        if allowed is None or taken <= allowed:
            return needed
    allowed = _allowed(lm, limits, rows, least.max_len, beside)
    own = rows * least.checkpoint_bytes
    if allowed is None or allowed <= own:
        raise ValueError(
            f"cache_memory_ratio={limits.cache_memory_ratio} leaves {allowed} bytes, and {rows} "
            f"rows take {own} beside their pages"
        )
    return terms(None, allowed - own)


def max_sequence_length(lm: LanguageModel, limits: InferenceLimits) -> int:
    """Tokens of an engine's texts.

    Raises:
      ValueError: if nothing says how many.
    """
    most = limits.max_seq_len or position_limit(lm.config)
    if most is None:
        raise ValueError("this model's positions have no end: give max_seq_len of limits=")
    return most


def _allowed(
    lm: LanguageModel, limits: InferenceLimits, rows: int, max_len: int, beside: int
) -> int | None:
    found = limits.allowed(lm, batch=rows, capacity=max_len)
    return None if found is None else max(found - beside, 0)


def with_slack(policies: Sequence[Any], slack: int) -> list[Any]:
    """With windows in pages that a whole chunk may be written behind."""
    found = []
    for each in policies:
        layout = paged(each.layout)
        if layout is not None:
            each = replace(each, layout=layout.with_slack(slack))
        found.append(each)
    return found
