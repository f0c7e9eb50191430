"""Which caches fit in a device's memory, and limits that ``generate`` enforces."""

import bisect
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh

from kvjax.core.target import default_device
from kvjax.core.typing import Json
from kvjax.core.validation import (
    INT32_MAX,
    ArgumentError,
    as_int,
    as_python,
    normalize_int_field,
    short_repr,
)
from kvjax.layouts import UNLIMITED
from kvjax.memory.planning import PREFILL_CHUNK, estimated_temporaries
from kvjax.memory.sizes import LoadedModel, Plannable, cache_nbytes, device_bytes, weight_bytes
from kvjax.placement.mesh import TENSOR, make_mesh, shard_over
from kvjax.policies.model_config import common_heads, position_limit
from kvjax.policies.presets import PolicyChoice, budget_of, policy


def device_memory() -> int:
    """Return the bytes of memory that programs may use on the default device.

    Raises:
      ValueError: if the device does not report its memory. CPUs don't.
    """
    device = default_device()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"a {device.device_kind} does not report its memory: give the number of bytes"
        )
    return int(stats["bytes_limit"])


AUTO_FRACTION = 0.8
"""The fraction of a device's memory that weights may fill before ``auto_mesh`` adds a device."""


def auto_mesh(model: Plannable, *, memory: int | None = None) -> Mesh | None:
    """Return the smallest mesh of local devices, along ``tensor``, in whose memory the weights fit.

    Returns None if they fit on one device, or if the device does not report its memory.

    Args:
      model: the model.
      memory: bytes of each device's memory; by default the default device reports it.

    Raises:
      ValueError: if all local devices together are too small.
    """
    if memory is None:
        try:
            memory = device_memory()
        except ValueError:
            return None
    allowed = int(AUTO_FRACTION * memory)
    least = whole = weight_bytes(model)
    if whole <= allowed:
        return None
    devices = jax.local_devices(backend=default_device().platform)
    for count in range(2, len(devices) + 1):
        share = weight_bytes(model, AbstractMesh((count,), (TENSOR,)))
        if share <= allowed:
            return make_mesh(tensor=count, devices=devices[:count])
        least = min(least, share)
    raise ValueError(
        f"the weights take {whole:,} bytes, and at least {least:,} per device when spread over the "
        f"{len(devices)} local device(s), but each may hold {allowed:,}: load with fewer bits, or "
        "give a mesh of more devices"
    )


@dataclass(frozen=True)
class InferenceLimits:
    """Limits for ``generate``. Requests that exceed them raise an error before any allocation.

    A cache passed to ``generate`` is not checked, since its memory is already allocated.

    Attributes:
      max_batch_size: maximum number of rows.
      max_seq_len: maximum number of tokens per row, prompt and new tokens together.
      cache_memory_ratio: the fraction of (device memory - weights - temporaries) that the cache may
        take.
      device_memory: bytes of device memory; by default the device reports it.
      prefetch_steps: how many batches ``generate_batches`` prepares in advance, and how many layers
        of the next batch's cache it moves to its ``placement`` in advance.

    Example:
      ```python
      limits = kvjax.memory.InferenceLimits(max_batch_size=2, max_seq_len=128)
      result = kvjax.generate(lm, "The json module", limits=limits, max_new_tokens=8)
      ```
    """

    max_batch_size: int | None = None
    max_seq_len: int | None = None
    cache_memory_ratio: float | None = None
    device_memory: int | None = None
    prefetch_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_seq_len"):
            normalize_int_field(self, name, 1, INT32_MAX, optional=True)
        normalize_int_field(self, "device_memory", 1, optional=True)
        normalize_int_field(self, "prefetch_steps", 0)
        ratio = as_python(self.cache_memory_ratio)
        object.__setattr__(self, "cache_memory_ratio", ratio)
        number = isinstance(ratio, int | float) and not isinstance(ratio, bool)
        if ratio is not None and not (number and 0 < ratio <= 1):
            raise ArgumentError(
                f"cache_memory_ratio must be above 0 and at most 1, got {short_repr(ratio)}",
                param="cache_memory_ratio",
            )
        if self.device_memory is not None and ratio is None:
            raise ArgumentError(
                "device_memory needs cache_memory_ratio: give both", param="device_memory"
            )

    def check(
        self,
        lm: LoadedModel,
        choice: PolicyChoice | None,
        *,
        batch: int,
        need: int,
        capacity: int,
        prompts: int | None = None,
        other_bytes: int = 0,
    ) -> None:
        """Raise ``ValueError`` if a request exceeds the limits.

        Args:
          lm: the model.
          choice: the policy of the cache that will be created, or None.
          batch: the number of rows of the cache.
          need: the maximum number of positions that a row's prompt and new tokens need.
          capacity: the cache's capacity in tokens per row.
          prompts: the number of rows with a prompt, by default all. Other rows only pad the batch
            to the mesh.
          other_bytes: bytes of another cache on the device.
        """
        prompts = batch if prompts is None else prompts
        if self.max_batch_size is not None and prompts > self.max_batch_size:
            raise ValueError(f"{prompts} prompts, but max_batch_size is {self.max_batch_size}")
        if self.max_seq_len is not None and need > self.max_seq_len:
            raise ValueError(
                f"prompt and new text need {need} positions, but max_seq_len is {self.max_seq_len}"
            )
        allowed = self.allowed(lm, batch=batch, capacity=capacity)
        if allowed is None or choice is None:
            return
        size = device_bytes(lm.config, choice, batch, capacity, lm.mesh) + other_bytes
        if size > allowed:
            raise ValueError(
                f"the cache would take {size:,} bytes of the device, but cache_memory_ratio="
                f"{self.cache_memory_ratio} of the memory left by weights and temporaries is "
                f"{allowed:,}"
            )

    def allowed(self, lm: LoadedModel, *, batch: int, capacity: int) -> int | None:
        """Return the bytes of device memory that a cache may use; None without
        ``cache_memory_ratio``."""
        if self.cache_memory_ratio is None:
            return None
        left = available_memory(lm, batch=batch, capacity=capacity, memory=self.device_memory)
        return int(self.cache_memory_ratio * left)


def available_memory(
    lm: LoadedModel, *, batch: int, capacity: int, memory: int | None = None
) -> int:
    """Return the bytes of memory of the device, or of each device of a mesh, minus weights and
    temporaries."""
    memory = device_memory() if memory is None else memory
    mesh_sharding = None if lm.mesh is None else shard_over(lm.mesh, common_heads(lm.config))
    temporaries = estimated_temporaries(
        lm.config, batch, min(PREFILL_CHUNK, capacity), mesh_sharding
    )
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(lm.params)
    )
    return max(memory - weights - temporaries, 0)


@dataclass(frozen=True)
class CacheFit:
    """How a cache fits in a device's memory.

    Attributes:
      name: name of the policy.
      cache: bytes of the cache on a device.
      host: bytes of the cache on the host.
      allowed: bytes that the cache may use on a device.
      largest_batch: the largest batch that fits at this length; 0 if none fits, None for no limit.
      largest_len: the largest length that fits at this batch size; 0 if none fits, None for no
        limit.
    """

    name: str
    cache: int
    host: int
    allowed: int
    largest_batch: int | None
    largest_len: int | None

    @property
    def fits(self) -> bool:
        """Whether the requested cache fits."""
        return self.cache <= self.allowed


DEFAULT_CHOICES: dict[str, Json] = {
    "static": {},
    "8 bits": {"bits": 8},
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "on the host": {"name": "offloaded_static"},
}
"""Arguments of ``policy`` for the caches that ``what_fits`` compares.

Caches on the device come first, better quality before worse. The cache on the host is last. Use the
first one that fits. 2 bits reduce quality.
"""


def what_fits(
    model: Plannable,
    *,
    batch: int = 1,
    max_len: int,
    memory: int | None = None,
    fraction: float = 1.0,
    devices: int = 1,
    policies: Mapping[str, PolicyChoice] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[CacheFit]:
    """Compute which caches fit in a device's memory. Returns one result per policy, in the order of
    ``policies``.

    Args:
      model, batch, max_len, prefill_chunk: as in ``plan``. Temporaries are estimated.
      memory: bytes of a device's memory; by default the default device reports it.
      fraction: the fraction that the cache may use of the memory that weights and temporaries leave
        free.
      devices: number of devices that share weights and cache evenly, by heads.
      policies: policies by name; by default static, 8, 4 and 2 bits, and a raw cache on the host.

    Raises:
      ValueError: if the device does not report its memory, or the devices can't share the heads
        evenly.

    Example:
      ```python
      for fit in kvjax.memory.what_fits(lm.architecture, max_len=1024, memory=2**27):
          print(fit)
      ```
    """
    batch = as_int("batch", batch, 1, INT32_MAX)
    max_len = as_int("max_len", max_len, 1, INT32_MAX)
    devices = as_int("devices", devices, 1)
    if not 0 < fraction <= 1:
        raise ArgumentError(
            f"fraction must be above 0 and at most 1, got {fraction}", param="fraction"
        )
    heads = common_heads(model.config)
    if heads % devices:
        raise ValueError(f"{devices} devices can't share {heads} key-value heads evenly")
    memory = device_memory() if memory is None else as_int("memory", memory, 1)
    prefill_chunk = as_int("prefill_chunk", prefill_chunk, 1)
    if policies is None:
        policies = {name: policy(**options) for name, options in DEFAULT_CHOICES.items()}
    weights = weight_bytes(model)

    def allowed(rows: int, tokens: int) -> int:
        temporaries = estimated_temporaries(model.config, rows, min(prefill_chunk, tokens))
        return int(fraction * max(devices * memory - weights - temporaries, 0)) // devices

    @functools.cache
    def size(name: str, rows: int, tokens: int) -> int:
        # All rows have the same size, unless a memory budget decides which layers are on the
        # device.
        if rows > 1 and budget_of(policies[name]) is None:
            return rows * size(name, 1, tokens)
        return device_bytes(model.config, policies[name], rows, tokens)

    def fits(name: str, rows: int, tokens: int) -> bool:
        try:
            return size(name, rows, tokens) <= devices * allowed(rows, tokens)
        except ValueError:  # too large even with all layers on the host
            return False

    limit = position_limit(model.config)
    return [
        CacheFit(
            name,
            -(-size(name, batch, max_len) // devices),
            cache_nbytes(model.config, choice, batch=batch, max_len=max_len).get("host", 0),
            allowed(batch, max_len),
            largest_that_fits(lambda n, name=name: fits(name, n, max_len)),
            largest_that_fits(lambda n, name=name: fits(name, batch, n), limit),
        )
        for name, choice in policies.items()
    ]


def largest_that_fits(fits: Callable[[int], bool], limit: int | None = None) -> int | None:
    """Find the largest number from 1 to ``limit`` that fits, by bisection; 0 if 1 does not fit.

    Returns None if ``limit`` is None and every length that a cache can have fits.
    """
    end = limit or UNLIMITED - 1
    largest = bisect.bisect(range(1, end + 1), False, key=lambda number: not fits(number))
    return limit if largest == end else largest
