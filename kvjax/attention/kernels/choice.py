"""Which kernels a target can run, with the JAX that is here. Nothing of Pallas is loaded for it."""

import sys

from kvjax.core import compat
from kvjax.core.target import Target


def kernels_for(target: Target) -> tuple[str, ...]:
    """The modules of ``kvjax.attention.kernels`` whose kernels a target can run, in the order in
    which they are tried. A CPU interprets them, where they are asked for by name."""
    if target.platform == "tpu":
        return ("mosaic_tpu",)
    there = []
    if compat.has_mosaic_gpu():
        there.append("mosaic_gpu")
    if compat.has_triton():
        there.append("triton")
    if target.platform == "cpu":
        return tuple(there[-1:])
    if target.capability is None:  # not one of NVIDIA's
        return tuple(name for name in there if name == "triton")
    return () if target.before_ampere else tuple(there)


def gained_by_upgrading(target: Target) -> str | None:
    """What kvjax would do better on a target with a newer JAX, in a sentence; None if nothing."""
    if target.platform == "tpu" and compat.JAX < (0, 8):
        return "JAX 0.8: the kernel reads the cache in HBM; before, a compiler may copy it first"
    if target.capability is None or target.before_ampere or compat.JAX >= (0, 12):
        return None
    python = " (needs Python 3.12)" if sys.version_info < (3, 12) else ""
    return f"JAX 0.12{python}: attention by the Mosaic GPU kernel, not by the Pallas Triton kernel"
