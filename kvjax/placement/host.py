"""In the host's memory, with the newest tokens on the device."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from kvjax.core import control
from kvjax.core.checks import is_traced, keep_whole
from kvjax.core.compat import jax_0_10_2_host_memory
from kvjax.core.target import default_device
from kvjax.placement.device import _T, Device


@dataclass(frozen=True)
class Host(Device):
    """The body in the host's memory, pinned; the tail, and what is computed with, on the device.

    A block crosses to the host once, when it leaves the tail. Updates stay in place inside a
    donated, jitted step. Gradients do not pass through such a cache.

    ``prefetch``: 0 fetches the filled blocks while attention walks them, one after the other, so
    that never more than one is on the device. With ``k`` layer ``i + k``'s whole body, filled or
    not, is on its way while layer ``i`` is computed, and up to ``k + 1`` layers of it are on the
    device: for accelerators, and not for stacks. Whether a copy goes on beside computation there is
    not known: none has run it, and a TPU's compiler has it in a branch.
    """

    prefetch: int = 0

    place: ClassVar[str] = "host"
    behind_tail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        keep_whole(self, "prefetch", 0)

    @property
    def memory_kind(self) -> str | None:
        return "pinned_host" if jax_0_10_2_host_memory(self.platform()) else None

    @property
    def ahead(self) -> int:
        return self.prefetch

    def store(self, body: _T, orders: Any) -> _T:
        if self.memory_kind is None:  # a move makes new arrays: the old ones are deleted behind it
            body = jax.device_put(body, may_alias=False)
        if self.spread is not None:
            return self.spread.put_bodies(body, orders, self.memory_kind)
        if not jax.sharding.get_abstract_mesh().empty and is_traced(jnp.zeros(())):
            # Which devices these are is up to the user's ``jax.shard_map`` or ``jax.set_mesh``.
            return self.far(body)
        sharding = SingleDeviceSharding(default_device(), memory_kind=self.memory_kind)
        return jax.device_put(body, sharding)

    def near(self, part: _T, after: Any = None) -> _T:
        """Part of a body, on the device; inside ``jit`` not to be fetched before ``after`` is
        there, a call's keys and the rows' lengths."""
        if self.memory_kind is None:
            return part
        if after is None or not is_traced(after[0]):
            return _fetched(part)
        # Compilers drop a barrier, or copy on the host for it, and would fetch all layers at once.
        # This is always true, which they can't know.
        there = (after[0].ravel()[0] == 0) | (after[1].ravel()[0] >= 0)
        empty = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        return control.cond(there, _fetched, empty, part)

    def far(self, part: _T) -> _T:
        return part if self.memory_kind is None else jax.device_put(part, self.space)


def _fetched(part: _T) -> _T:
    return jax.device_put(part, jax.memory.Space.Device)
