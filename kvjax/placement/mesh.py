"""A mesh of devices: its three axes, and what is refused."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from kvjax.core.absent import absent_devices
from kvjax.core.checks import whole_number

DATA, TENSOR, SEQUENCE = AXES = ("data", "tensor", "sequence")
"""Of the rows, of the heads, and of the slots."""
_STAGES = ("stage", "stages", "pipe", "pipeline", "pp")


def make_mesh(*, data: int = 1, tensor: int = 1, sequence: int = 1, devices: Any = None) -> Mesh:
    """A mesh for ``init_cache``, ``models.load`` and ``generate``.

    Args:
      data: shares of the rows of a batch.
      tensor: shares of the heads, and of the weights. Where the model has fewer key-value heads,
        devices have copies of them.
      sequence: shares of the positions of a text, for texts that one device has no memory for.
      devices: which; by default the first of all, of every process. Or the name of a kind of
        device that need not be here, ``"v5e"`` or ``"h200"``, of which so many are taken, to
        compile for.

    Raises:
      ValueError: if a number is not whole and positive, there are fewer devices, or ``devices``
        is no list of different ones.
      MissingCompilerError: if ``devices`` is a name, and its compiler is not installed.
    """
    sizes = {DATA: data, TENSOR: tensor, SEQUENCE: sequence}
    sizes = {name: whole_number(name, size, 1) for name, size in sizes.items()}
    if isinstance(devices, str):
        devices = absent_devices(devices, math.prod(sizes.values()))
    if devices is not None and not _are_devices(devices):
        raise ValueError(f"devices must be a list of different jax.Device, got {devices!r:.80}")
    devices = jax.devices() if devices is None else list(np.ravel(np.asarray(devices, object)))
    count = math.prod(sizes.values())
    if count > len(devices):
        asked = " x ".join(f"{name}={size}" for name, size in sizes.items())
        more = f"XLA_FLAGS=--xla_force_host_platform_device_count={count} simulates so many"
        hint = f" ({more})" if all(each.platform == "cpu" for each in devices) else ""
        raise ValueError(f"a mesh {asked} is of {count} devices: there are {len(devices)}{hint}")
    shape, kinds = tuple(sizes.values()), (AxisType.Auto,) * 3
    return jax.make_mesh(shape, AXES, axis_types=kinds, devices=devices[:count])


def _are_devices(given: Any) -> bool:
    if not isinstance(given, Sequence | np.ndarray):
        return False
    found = list(np.ravel(np.asarray(given, object)))
    return all(isinstance(each, jax.Device) for each in found) and len(set(found)) == len(found)


def parse_mesh(text: str) -> dict[str, int]:
    """``data=2,tensor=4`` as the arguments of ``make_mesh``.

    Raises:
      ValueError: if it is written otherwise, or names another axis.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (words.strip() for words in part.partition("="))
        if equals:
            refuse_axis(name)
        if not equals or not size.isdecimal() or name in found:
            raise ValueError(
                f"a mesh is written as data=2,tensor=4,sequence=1, each once, or auto; got {text!r}"
            )
        found[name] = whole_number(name, int(size), 1)
    return found


def refuse_axis(name: Any) -> None:
    """Raise ``ValueError`` for an axis that is none of a mesh's."""
    if name in _STAGES:
        raise ValueError(
            f"the mesh has an axis {name!r}: layers are not divided into stages, where a step "
            "would wait for one device after the other; use tensor, whose devices work together"
        )
    if name not in AXES:
        raise ValueError(f"the mesh has an axis {name!r}: there are {', '.join(AXES)}")
