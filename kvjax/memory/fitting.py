"""Which caches fit into a device's memory."""

import bisect
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvjax.core.validation import INT32_MAX, as_int
from kvjax.layouts import UNLIMITED
from kvjax.memory.limits import device_memory
from kvjax.memory.planning import PREFILL, estimated_temporaries
from kvjax.memory.sizes import cache_nbytes, device_bytes
from kvjax.memory.weights import Plannable, weight_bytes
from kvjax.policies.model_config import common_heads, position_limit
from kvjax.policies.presets import PolicyChoice, budget_of, policy


@dataclass(frozen=True)
class Room:
    """How much of a cache fits. ``cache``: bytes of it on a device, and ``host`` on the host;
    ``allowed``: bytes it may take on the device; ``largest_batch`` at the length asked for, and
    ``largest_len`` at the batch, both 0 where not even one fits, None where the device sets no end
    to it."""

    name: str
    cache: int
    host: int
    allowed: int
    largest_batch: int | None
    largest_len: int | None

    @property
    def fits(self) -> bool:
        """Whether the cache that was asked for does."""
        return self.cache <= self.allowed


CHOICES: dict[str, dict[str, Any]] = {
    "static": {}, "8 bits": {"bits": 8}, "4 bits": {"bits": 4}, "2 bits": {"bits": 2},
    "on the host": {"name": "offloaded_static"},
}  # fmt: skip
"""Settings of ``policy`` that ``what_fits`` compares: on the device the best quality first, and
what needs least of it last. The first that fits is the one to take; 2 bits lose quality."""


def what_fits(
    model: Plannable,
    *,
    batch: int = 1,
    max_len: int,
    memory: int | None = None,
    fraction: float = 1.0,
    devices: int = 1,
    choices: Mapping[str, PolicyChoice] | None = None,
    prefill_chunk: int = PREFILL,
) -> list[Room]:
    """Which caches fit into a memory, the best first.

    Args:
      model, batch, max_len, prefill_chunk: as in ``plan``. Temporaries are estimated.
      memory: bytes of a device; by default this one's.
      fraction: what the cache may take of what weights and temporaries leave.
      devices: how many share weights and cache evenly, by heads.
      choices: policies by name; by default static, 8, 4 and 2 bits, and a raw cache on the host.

    Raises:
      ValueError: if the device does not say how much memory it has, or heads can't be shared so.
    """
    batch, max_len = (
        as_int("batch", batch, 1, INT32_MAX),
        as_int("max_len", max_len, 1, INT32_MAX),
    )
    devices = as_int("devices", devices, 1)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: it is above 0 and at most 1")
    heads = common_heads(model.config)
    if heads % devices:
        raise ValueError(f"{devices} devices can't share {heads} key-value heads evenly")
    memory = device_memory() if memory is None else as_int("memory", memory, 1)
    prefill_chunk = as_int("prefill_chunk", prefill_chunk, 1)
    named = {name: policy(**it) for name, it in CHOICES.items()} if choices is None else choices
    weights = weight_bytes(model)

    def allowed(rows: int, tokens: int) -> int:
        temporaries = estimated_temporaries(model.config, rows, min(prefill_chunk, tokens))
        return int(fraction * max(devices * memory - weights - temporaries, 0)) // devices

    @functools.cache
    def taken(name: str, rows: int, tokens: int) -> int:
        # Rows are alike, but where a memory decides which layers are on the device.
        if rows > 1 and budget_of(named[name]) is None:
            return rows * taken(name, 1, tokens)
        return device_bytes(model.config, named[name], rows, tokens)

    def holds(name: str, rows: int, tokens: int) -> bool:
        try:
            return taken(name, rows, tokens) <= devices * allowed(rows, tokens)
        except ValueError:  # too much even with all layers on the host
            return False

    limit = position_limit(model.config)
    return [
        Room(
            name, -(-taken(name, batch, max_len) // devices),
            cache_nbytes(model.config, named[name], batch=batch, max_len=max_len).get("host", 0),
            allowed(batch, max_len),
            largest(lambda n, name=name: holds(name, n, max_len)),
            largest(lambda n, name=name: holds(name, batch, n), limit),
        )
        for name in named
    ]  # fmt: skip


def largest(holds: Callable[[int], bool], limit: int | None = None) -> int | None:
    """The largest number from 1 up that holds, where all below it do, and at most ``limit``; 0 if
    1 does not, None if there is no limit and all hold that a cache can have tokens."""
    end = limit or UNLIMITED - 1
    found = bisect.bisect(range(1, end + 1), False, key=lambda number: not holds(number))
    return limit if found == end else found
