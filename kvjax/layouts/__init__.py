"""Layouts: which slot of a cache holds which position."""

from kvjax.core.validation import UNLIMITED as UNLIMITED
from kvjax.layouts.layout import Dense, Growing, Layout, Region, Run
from kvjax.layouts.layout import LayoutSpec as LayoutSpec
from kvjax.layouts.paged import Paged
from kvjax.layouts.paged import as_paged as as_paged
from kvjax.layouts.paged import unpaged_layout as unpaged_layout
from kvjax.layouts.ring import Ring
from kvjax.layouts.split import LayoutSlice as LayoutSlice
from kvjax.layouts.split import Shard as Shard
from kvjax.layouts.split import Split as Split
from kvjax.layouts.split import mask_slots as mask_slots
from kvjax.layouts.split import split_slots as split_slots

__all__ = ["Dense", "Growing", "Layout", "Paged", "Region", "Ring", "Run"]
