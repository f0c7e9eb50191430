"""The path ``pallas``: a layer's body by a kernel, its tail and sinks beside it."""

import importlib
from typing import Any

from kvjax.attention.buckets import prefix
from kvjax.attention.inputs import AttentionInputs, Unserved
from kvjax.attention.kernels.choice import kernels_for
from kvjax.attention.kernels.common import Reading, refuse
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import Section
from kvjax.core.target import current_target
from kvjax.core.typing import AttentionOutput


def pallas(inputs: AttentionInputs) -> AttentionOutput:
    """Softmax over every section by flash decoding, or in one piece where the kernel can't read a
    smaller one: by the first of the target's kernels that can read the largest.

    Raises:
      Unserved: if the target has no kernel, the call has a bias, or the layer is stored in a way
        that no kernel can read.
    """
    target = current_target()
    names = kernels_for(target)
    if not names:
        raise Unserved(f"the attention path 'pallas' has no kernel for {target}")
    for name in names[:-1]:
        try:
            return _by(_module(name), inputs)
        except Unserved:
            continue
    return _by(_module(names[-1]), inputs)


def _by(kernel: Any, inputs: AttentionInputs) -> AttentionOutput:
    """By one of the kernels."""
    largest = max(inputs.sections, key=lambda each: each.size * each.unit)
    refuse("pallas", _refusals(kernel, inputs, largest.as_pages()))

    def over(section: Section, before: Partial | None = None) -> Partial:
        pages = section.as_pages()
        if section is largest or not any(_refusals(kernel, inputs, pages).values()):
            found: Partial = kernel.decode(Reading.of(inputs, pages), before)
            return found
        return prefix(section, section.size, inputs.rows(section), inputs.mask, before)

    found = over(inputs.sections[0])
    for each in inputs.sections[1:]:
        found = over(each, found)
    return inputs.finish(found)


def _refusals(kernel: Any, inputs: AttentionInputs, section: Section) -> dict[str, object]:
    """Why a kernel can't read a section for a call, and whether that is so."""
    if section.placement.needs_tail:
        return {"reads nothing on the host": True}
    return {
        "adds no bias to scores": inputs.mask.bias is not None,
        f"takes blocks of a power of two, not {section.unit}": section.unit & section.unit - 1,
        "reads no keys that are stored before their rotation": section.table is not None,
        **kernel.refusals(section, inputs.rows(section)),
    }  # fmt: skip


def _module(name: str) -> Any:
    """A kernel's module."""
    return importlib.import_module(f"kvjax.attention.kernels.{name}")
