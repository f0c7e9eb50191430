"""The path ``pallas``: a layer's body by a kernel, its tail and sinks beside it."""

from typing import Any

from kvjax.attention.buckets import prefix
from kvjax.attention.call import Call
from kvjax.attention.kernels import mosaic, triton
from kvjax.attention.kernels.common import Reading, refuse
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import Section
from kvjax.core.device import traced_for
from kvjax.core.typing import Mixed


def pallas(call: Call) -> Mixed:
    """Softmax over every section by flash decoding, or in one piece where the kernel can't read a
    smaller one: by Mosaic on TPUs, by Triton elsewhere.

    Raises:
      ValueError: if the call has a bias, or the layer is stored in a way that the kernel can't
        read.
    """
    largest = max(call.sections, key=lambda each: each.size * each.unit)
    refuse("pallas", refusals(call, largest.as_pages()))

    def over(section: Section, before: Partial | None = None) -> Partial:
        pages = section.as_pages()
        if section is largest or not any(refusals(call, pages).values()):
            found: Partial = _kernels().decode(Reading.of(call, pages), before)
            return found
        return prefix(section, section.size, call.rows(section), call.mask, before)

    found = over(call.sections[0])
    for each in call.sections[1:]:
        found = over(each, found)
    return call.finish(found)


def refusals(call: Call, section: Section) -> dict[str, object]:
    """Why a kernel can't read a section for a call, and whether that is so."""
    if section.placement.behind_tail:
        return {"reads nothing on the host": True}
    kernel = _kernels()
    head_dim = call.queries.shape[3]
    return {
        "adds no bias to scores": call.mask.bias is not None,
        f"takes blocks of a power of two, not {section.unit}": section.unit & section.unit - 1,
        "reads no keys that are stored before their rotation": section.table is not None,
        **kernel.refusals(section, head_dim),
    }  # fmt: skip


def _kernels() -> Any:
    """The module of the platform's kernel."""
    return mosaic if traced_for() == "tpu" else triton
