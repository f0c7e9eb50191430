"""Planning of memory use: bytes of caches, weights and programs, and what fits on a device."""

from kvjax.memory.device_plan import DevicePlan, plan_on
from kvjax.memory.limits import InferenceLimits, what_fits
from kvjax.memory.pages import PageMap, page_map
from kvjax.memory.planning import Plan
from kvjax.memory.shapes import ModelShape
from kvjax.memory.sizes import cache_nbytes, memory_report

__all__ = [
    "DevicePlan",
    "InferenceLimits",
    "ModelShape",
    "PageMap",
    "Plan",
    "cache_nbytes",
    "memory_report",
    "page_map",
    "plan_on",
    "what_fits",
]
