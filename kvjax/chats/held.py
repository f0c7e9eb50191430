"""What a chat's cache holds."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.chats.known import common
from kvjax.core.transfer import fetch
from kvjax.generation.cache_choice import limit_memory
from kvjax.generation.capacity import capacity_bucket, max_capacity
from kvjax.generation.loaded_model import LanguageModel
from kvjax.layouts import UNLIMITED
from kvjax.memory.sizes import abstract_cache
from kvjax.operations.rows import reset, rewind, rewindable
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads, trained_context
from kvjax.policies.presets import PolicyChoice

_LENGTH = 4096
"""Tokens that a chat can have, unless somebody says otherwise."""


@dataclass(frozen=True)
class Held:
    """A cache of one row, and the tokens that it holds."""

    cache: KVCache
    tokens: tuple[int, ...] = ()

    def back_to(self, ids: Sequence[int]) -> tuple["Held", int]:
        """What ``ids`` can be gone on from, one token of them at least being left to be read; and
        how many tokens that were held with them must be read again, as the cache can't be rewound
        so far."""
        same = min(common(self.tokens, ids), len(ids) - 1)
        surplus = len(self.tokens) - same
        if not surplus:
            return self, 0
        if surplus > fetch(rewindable(self.cache))[0]:
            return Held(reset(self.cache)), same
        return Held(rewind(self.cache, surplus), self.tokens[:same]), 0

    @property
    def most(self) -> int | None:
        """Tokens that it can ever hold; None where it has no end."""
        most = max_capacity(self.cache)
        return None if most >= UNLIMITED else most


def empty(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> Held:
    """A new one; where it grows, it begins small."""
    policy, room = limit_memory(lm, policy, None, 1, max_len), min(capacity_bucket(1), max_len)
    return Held(
        allocate(lm.config, policy, batch=1, max_len=max_len, initial_len=room, mesh=lm.mesh)
    )


def most_of(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> int | None:
    """``Held.most`` of an empty one, which is not made."""
    policy = limit_memory(lm, policy, None, 1, max_len)
    return Held(abstract_cache(lm.config, policy, batch=1, max_len=max_len, mesh=lm.mesh)).most


def length_for(lm: LanguageModel, max_len: int | None) -> int:
    """Tokens that a chat can have: as asked, or what the model was trained for, at most 4,096.

    Raises:
      ValueError: if the model's mesh divides rows, of which a chat has one.
    """
    if lm.mesh is not None and (rows := shard_over(lm.mesh, common_heads(lm.config)).rows) > 1:
        raise ValueError(
            f"a chat is one text, and this mesh shares out {rows} rows: give one whose data is 1"
        )
    if max_len is not None:
        return max_len
    return min(_LENGTH, trained_context(lm.config) or _LENGTH)
