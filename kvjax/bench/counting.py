"""Bytes that a decode step must read, counted from what is stored."""

from dataclasses import dataclass
from typing import Any

import jax

from kvjax.generation.model import LanguageModel
from kvjax.memory.planning import _HEADS, _LOOKUPS, _POSITIONS, plan
from kvjax.policies.presets import PolicyChoice


@dataclass(frozen=True)
class _Loaded:
    """What ``plan`` counts for, with the parameters as they are."""

    config: Any
    params: Any

    def abstract_params(self) -> Any:
        return self.params


def cache_bytes_read(
    lm: LanguageModel, policy: PolicyChoice | None, *, batch: int, max_len: int, length: int
) -> int:
    """Bytes of a cache that the query behind ``length`` tokens, itself among them, sees in every
    row, as its codecs store them."""
    loaded = _Loaded(lm.config, lm.params)
    found = plan(loaded, policy, batch=batch, max_len=max_len, length=length, compiled=False)
    return round(found.moved - found.weights)


def weight_bytes_read(params: Any, batch: int) -> int:
    """Bytes of a model's parameters that a step reads: every one once, but of positions, and of an
    embedding that is not the head as well, only as many rows as there are texts."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(({str(getattr(key, "key", key)) for key in path}, leaf))
    has_head = any(names & _HEADS for names, _ in leaves)
    total = 0
    for names, leaf in leaves:
        looked_up = names & _POSITIONS or (has_head and names & _LOOKUPS)
        size = leaf.size * leaf.dtype.itemsize
        total += min(batch, leaf.shape[0]) * size // leaf.shape[0] if looked_up else size
    return total
