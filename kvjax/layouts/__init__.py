"""Layouts: which slot of a cache holds which position. Pure integer maths."""

from kvjax.core.checks import UNLIMITED
from kvjax.layouts.dense import Dense, Growing
from kvjax.layouts.layout import Layout, Region, Run
from kvjax.layouts.paged import Paged, paged, unpaged_layout
from kvjax.layouts.part import Part, Share, divided, shared
from kvjax.layouts.ring import Ring
from kvjax.layouts.split import Split

__all__ = [
    "UNLIMITED", "Dense", "Growing", "Layout", "Paged", "Part", "Region", "Ring",
    "Run", "Share", "Split", "divided", "paged", "shared",
    "unpaged_layout",
]  # fmt: skip
