"""What fits into a device's memory, and limits that ``generate`` keeps."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from kvjax.cache.sizes import nbytes
from kvjax.core.checks import whole_number
from kvjax.core.device import default_device
from kvjax.layouts import UNLIMITED
from kvjax.memory.planning import (
    PREFILL,
    Plannable,
    abstract_cache,
    bytes_ahead,
    cache_nbytes,
    estimated_temporaries,
    weight_bytes,
)
from kvjax.placement.mesh import TENSOR, make_mesh
from kvjax.placement.spread import spread_over
from kvjax.policies.presets import PolicyChoice, budget_of, policy


def device_memory() -> int:
    """Bytes of the default device's memory that programs may use.

    Raises:
      ValueError: if the device does not say (a CPU does not).
    """
    device = default_device()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"{device.device_kind} does not say how much memory it has: give the bytes"
        )
    return int(stats["bytes_limit"])


AUTO_FRACTION = 0.8
"""Of a device's memory, what weights may take before ``auto_mesh`` takes another device."""


def auto_mesh(model: Plannable, *, memory: int | None = None) -> Mesh | None:
    """The smallest mesh of local devices, along ``tensor``, of which each has room for its share of
    a model's weights; None where one device has, or does not say how much memory it has.

    Args:
      model: an ``Architecture``.
      memory: bytes of a device; by default what the default device says.

    Raises:
      ValueError: if no number of them has.
    """
    default = default_device()
    if memory is None:
        stats = default.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        memory = int(stats["bytes_limit"])
    room = int(AUTO_FRACTION * memory)
    if weight_bytes(model) <= room:
        return None
    devices = jax.local_devices(backend=default.platform)
    least = weight_bytes(model)
    for count in range(2, len(devices) + 1):
        share = weight_bytes(model, AbstractMesh((count,), (TENSOR,)))
        if share <= room:
            return make_mesh(tensor=count, devices=devices[:count])
        least = min(least, share)
    raise ValueError(
        f"the weights take {weight_bytes(model):,} bytes, and spread over the {len(devices)} local "
        f"device(s) at least {least:,} on each, which has {room:,} for them: load fewer bits, or "
        "give a mesh of more devices"
    )


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
      model: as in ``plan``. Temporaries are estimated.
      batch, max_len: what is asked for.
      memory: bytes of a device; by default this one's.
      fraction: what the cache may take of what weights and temporaries leave.
      devices: how many share weights and cache evenly, by heads.
      choices: policies by name; by default static, 8, 4 and 2 bits, and a raw cache
        on the host.

    Raises:
      ValueError: if the device does not say how much memory it has, or heads can't be shared so.
    """
    batch, max_len = whole_number("batch", batch, 1), whole_number("max_len", max_len, 1)
    devices = whole_number("devices", devices, 1)
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction}: it is above 0 and at most 1")
    if model.config.num_key_value_heads % devices:
        raise ValueError(
            f"{devices} devices can't share {model.config.num_key_value_heads} key-value heads "
            "evenly"
        )
    memory = device_memory() if memory is None else whole_number("memory", memory, 1)
    prefill_chunk = whole_number("prefill_chunk", prefill_chunk, 1)
    named = {name: policy(**it) for name, it in CHOICES.items()} if choices is None else choices
    weights = weight_bytes(model)

    def allowed(rows: int, tokens: int) -> int:
        temporaries = estimated_temporaries(model.config, rows, min(prefill_chunk, tokens))
        return int(fraction * max(devices * memory - weights - temporaries, 0)) // devices

    @functools.cache
    def row(name: str, tokens: int, place: str = "device") -> int:
        if place == "device":
            return device_bytes(model.config, named[name], 1, tokens)
        return cache_nbytes(model.config, named[name], max_len=tokens).get(place, 0)

    def taken(name: str, rows: int, tokens: int, place: str = "device") -> int:
        # Rows are alike, but where a memory decides which layers are on the device.
        if budget_of(named[name]) is None:
            return rows * row(name, tokens, place)
        if place == "device":
            return device_bytes(model.config, named[name], rows, tokens)
        sizes = cache_nbytes(model.config, named[name], batch=rows, max_len=tokens)
        return sizes.get(place, 0)

    def holds(name: str, rows: int, tokens: int) -> bool:
        try:
            size = taken(name, rows, tokens)
        except ValueError:  # too much even with all layers on the host
            return False
        return -(-size // devices) <= allowed(rows, tokens)

    limit = getattr(model.config, "position_limit", None)
    return [
        Room(
            name, -(-taken(name, batch, max_len) // devices), taken(name, batch, max_len, "host"),
            allowed(batch, max_len),
            largest(lambda n, name=name: holds(name, n, max_len)),
            largest(lambda n, name=name: holds(name, batch, n), limit),
        )
        for name in named
    ]  # fmt: skip


def device_bytes(
    config: Any, choice: PolicyChoice | None, batch: int, max_len: int, mesh: Mesh | None = None
) -> int:
    """Bytes of the device, or of each device of a mesh, that a cache takes, layers that are fetched
    ahead among them."""
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len, mesh=mesh)
    return nbytes(cache, cache.spread).get("device", 0) + bytes_ahead(cache)


def largest(holds: Callable[[int], bool], limit: int | None = None) -> int | None:
    """The largest number from 1 up that holds, where all below it do, and at most ``limit``; 0 if
    1 does not, None if there is no limit and all hold that a cache can have tokens."""
    end = limit or UNLIMITED - 1
    if holds(end):
        return limit
    low, high = 0, 1
    while high < end and holds(high):
        low, high = high, high * 2
    high = min(high, end)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class InferenceLimits:
    """What ``generate`` may take: a request beyond it is an error before anything is allocated.

    ``max_batch_size``: rows; ``max_seq_len``: tokens of prompt and new text, a row;
    ``cache_memory_ratio``: the part of (device memory - weights - temporaries) that the cache may
    take; ``device_memory``: bytes, by default what the device says it has. A cache that is given is
    there already: its bytes are not checked. ``prefetch_steps``: what ``generate_batches`` gets
    ready ahead: so many batches, and so many layers of the next one's cache.
    """

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    cache_memory_ratio: float | None = None
    device_memory: int | None = None
    prefetch_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len", "device_memory"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        whole_number("prefetch_steps", self.prefetch_steps, 0)
        ratio = self.cache_memory_ratio
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (number and 0 < ratio <= 1):
            raise ValueError(f"cache_memory_ratio={ratio}: it is above 0 and at most 1")
        if self.device_memory is not None and ratio is None:
            raise ValueError("device_memory is what cache_memory_ratio is a part of: give both")

    def check(
        self, lm: Any, choice: PolicyChoice | None, *, batch: int, need: int, capacity: int,
        prompts: int | None = None,
    ) -> None:  # fmt: skip
        """Raise ``ValueError`` for a request that is beyond the limits.

        Args:
          lm: the model, whose weights are on the device.
          choice: the policy of the cache to make, None where none is made.
          batch: rows, of which the last may be empty, to fill a mesh up.
          need: tokens of prompt and new text, at most.
          capacity: tokens a row of the cache.
          prompts: rows that are not empty; by default all.
        """
        prompts = batch if prompts is None else prompts
        if self.max_batch_size is not None and prompts > self.max_batch_size:
            raise ValueError(f"{prompts} prompts, but max_batch_size is {self.max_batch_size}")
        if self.max_seq_len is not None and need > self.max_seq_len:
            raise ValueError(
                f"prompt and new text come to {need} tokens, but max_seq_len is {self.max_seq_len}"
            )
        allowed = self.allowed(lm, batch=batch, capacity=capacity)
        if allowed is None or choice is None:
            return
        taken = device_bytes(lm.config, choice, batch, capacity, getattr(lm, "mesh", None))
        if taken > allowed:
            raise ValueError(
                f"the cache would take {taken:,} bytes of the device, but cache_memory_ratio="
                f"{self.cache_memory_ratio} of what weights and temporaries leave is {allowed:,}"
            )

    def allowed(self, lm: Any, *, batch: int, capacity: int) -> int | None:
        """Bytes of the device that a cache may take, None where no part of it is given."""
        if self.cache_memory_ratio is None:
            return None
        left = memory_left(lm, batch=batch, capacity=capacity, memory=self.device_memory)
        return int(self.cache_memory_ratio * left)


def device_share(tree: Any) -> int:
    """Bytes of a pytree's arrays that a device has."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def memory_left(lm: Any, *, batch: int, capacity: int, memory: int | None = None) -> int:
    """Bytes of the device, or of each device of a mesh, that a model's weights, and the temporaries
    of a chunk, leave."""
    memory = device_memory() if memory is None else memory
    mesh, spread = getattr(lm, "mesh", None), None
    if mesh is not None:
        spread = spread_over(mesh, lm.config.num_key_value_heads)
        batch //= spread.rows
    temporaries = estimated_temporaries(lm.config, batch, min(PREFILL, capacity), spread)
    return max(memory - device_share(lm.params) - temporaries, 0)
