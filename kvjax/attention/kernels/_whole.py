"""What the libraries' kernels ask for: one raw array a layer, from its first slot on."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.attention.blocks import blockwise
from kvjax.attention.call import Call
from kvjax.core.typing import Array, Mixed


def refuse(path: str, reasons: dict[str, object]) -> None:
    """Raise ``ValueError`` for the first reason that is true."""
    for reason, true in reasons.items():
        if true:
            raise ValueError(f"the attention path {path!r} {reason}")


def compiled(run: Callable[..., Any], *arrays: Array) -> Any:
    """``run(*arrays, interpret=)``, without a device's compiler on CPUs."""
    interpreted = functools.partial(run, interpret=True)
    return lax.platform_dependent(
        *arrays, cpu=interpreted, default=functools.partial(run, interpret=False)
    )


def one_raw(path: str, call: Call) -> tuple[Array, Array]:
    """Keys and values [batch, kv_heads, slots, head_dim] of a layer of one section, as numbers.

    Raises:
      ValueError: if there are more, or the call asks for what no library's kernel has.
    """
    sections, mask = call.sections, call.mask
    refuse(path, {
        "reads raw caches alone": sections[0].split is not None,
        "adds no bias to scores": mask.bias is not None,
        "sees no chunks": mask.chunk is not None,
        "reads the slots of one device alone": mask.axis is not None,
        "keeps no sinks": len(sections) > 1 or mask.sinks,
    })  # fmt: skip
    keys, values = sections[0].codecs
    return keys.decode(sections[0].keys), values.decode(sections[0].values)


def from_beginning(call: Call, run: Callable[[Array, Array, Array], Array]) -> Mixed:
    """``run(keys, values, present)`` over the first slots, where the text of every row begins with
    this call, and they hold positions 0 to ``new - 1``; else the walk. ``present``: bool[batch,
    new], what a row has of them; values of the others are 0."""
    new, section, length = call.queries.shape[2], call.sections[0], call.length
    if new > section.size:
        return blockwise(call)

    def text() -> Mixed:
        present = jnp.arange(new) < length[:, None]
        keys, values = (
            codec.decode(store[:, :, :new]).astype(call.queries.dtype)
            for codec, store in zip(section.codecs, (section.keys, section.values), strict=True)
        )
        values = jnp.where(present[:, None, :, None], values, 0)
        return jnp.where((length > 0)[:, None, None, None], run(keys, values, present), 0)

    # Positions that all are the last one's are those of a call that is not causal.
    own = call.mask.queries == jnp.arange(new, dtype=jnp.int32)
    return lax.cond(jnp.all(own), text, lambda: blockwise(call))
