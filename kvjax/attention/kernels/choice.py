"""Which kernels a target can run, with the JAX that is here. Nothing of Pallas is loaded for it."""

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
