"""The path ``pallas``: attention by the first kernel of the target that can read the layer.

The kernels are imported when they are first used, because Pallas takes up to a second to import.
"""

import importlib
import sys
from types import ModuleType

from kvjax.attention.blocks import prefix
from kvjax.attention.kernels.common import KernelInputs, refuse
from kvjax.attention.softmax import AttentionInputs, Partial, Unsupported
from kvjax.cache.sections import Section
from kvjax.core import compat
from kvjax.core.target import Target, current_target
from kvjax.core.typing import AttentionOutput


def kernels_for(target: Target) -> tuple[str, ...]:
    """The kernel modules that a target can run with the installed JAX, in the order in which they
    are tried. A CPU interprets a kernel if the path ``pallas`` is requested by name."""
    if target.platform == "tpu":
        return ("mosaic_tpu",)
    available = []
    if compat.has_mosaic_gpu():
        available.append("mosaic_gpu")
    if compat.has_triton():
        available.append("triton")
    if target.platform == "cpu":
        return tuple(available[-1:])
    if target.capability is None:  # not an NVIDIA GPU
        return tuple(name for name in available if name == "triton")
    return () if target.before_ampere else tuple(available)


def gained_by_upgrading(target: Target) -> str | None:
    """A sentence on what a newer JAX would improve on a target; None if nothing."""
    if target.platform == "tpu" and compat.JAX < (0, 8):
        return "JAX 0.8: the kernel reads the cache in HBM; before, a compiler may copy it first"
    if target.capability is None or target.before_ampere or compat.JAX >= (0, 12):
        return None
    python = " (needs Python 3.12)" if sys.version_info < (3, 12) else ""
    return f"JAX 0.12{python}: attention by the Mosaic GPU kernel, not by the Pallas Triton kernel"


def pallas(inputs: AttentionInputs) -> AttentionOutput:
    """Attention over each section of a layer by a flash-decoding kernel. Sections other than the
    largest one that the kernel can't read are computed without it.

    Raises:
      Unsupported: if the target has no kernel, scores have a bias, or no kernel can read how the
        layer is stored.
    """
    target = current_target()
    names = kernels_for(target)
    if not names:
        raise Unsupported(f"the attention path 'pallas' has no kernel for {target}")
    for name in names[:-1]:
        try:
            return _attend_by(_module(name), inputs)
        except Unsupported:
            continue
    return _attend_by(_module(names[-1]), inputs)


def _attend_by(kernel: ModuleType, inputs: AttentionInputs) -> AttentionOutput:
    """Attention by one kernel."""
    largest = max(inputs.sections, key=lambda section: section.size * section.unit)
    refuse("pallas", _refusals(kernel, inputs, largest.as_pages()))

    def over(section: Section, before: Partial | None = None) -> Partial:
        pages = section.as_pages()
        if section is largest or not any(_refusals(kernel, inputs, pages).values()):
            partial: Partial = kernel.decode(KernelInputs.of(inputs, pages), before)
            return partial
        return prefix(section, section.size, inputs.rows(section), inputs.mask, before)

    partial = over(inputs.sections[0])
    for section in inputs.sections[1:]:
        partial = over(section, partial)
    return inputs.finish(partial)


def _refusals(kernel: ModuleType, inputs: AttentionInputs, section: Section) -> dict[str, object]:
    """Reasons for which a kernel can't read a section, and whether each applies."""
    if section.placement.needs_tail:
        return {"can't read host memory": True}
    return {
        "does not support a bias": inputs.mask.bias is not None,
        f"needs blocks of a power of two, not {section.unit} tokens": section.unit
        & section.unit - 1,
        "can't read unrotated keys": section.rotary is not None,
        **kernel.refusals(section, inputs.rows(section)),
    }


def _module(name: str) -> ModuleType:
    """A kernel's module."""
    return importlib.import_module(f"kvjax.attention.kernels.{name}")
