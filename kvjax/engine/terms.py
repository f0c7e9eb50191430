"""What an engine's rows have in common: policies, pages, and the grid of positions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvjax.generation.model import LanguageModel
from kvjax.layouts import Ring, paged
from kvjax.memory.limits import InferenceLimits
from kvjax.policies.presets import PolicyChoice, per_layer
from kvjax.prefixes.terms import Terms, terms_for


def engine_terms(
    lm: LanguageModel, policy: PolicyChoice, limits: InferenceLimits, pages: int | None,
    memory: int | str | None, prefill_chunk: int, rounds: int, exact: bool, checkpoint_every: int,
) -> Terms:  # fmt: skip
    policies = _with_slack(per_layer(policy, lm.config), max(prefill_chunk, rounds) - 1)
    rows = limits.max_batch_size or 8
    if pages is None and memory is None:
        found = terms_for(
            lm, policies, 1, None, limits.max_seq_len, prefill_chunk, exact, checkpoint_every
        )
        pages = rows * max(kind.paging.layout.columns for kind in found.kinds)
    return terms_for(
        lm, policies, pages, memory, limits.max_seq_len, prefill_chunk, exact, checkpoint_every
    )


def _with_slack(policies: Sequence[Any], slack: int) -> list[Any]:
    """With windows in pages that a whole chunk may be written behind."""
    found = []
    for each in policies:
        layout = paged(each.layout)
        if layout is not None and isinstance(layout.inner, Ring):
            more = max(layout.inner.slack or 0, slack)
            each = replace(each, layout=replace(layout, inner=replace(layout.inner, slack=more)))
        found.append(each)
    return found
