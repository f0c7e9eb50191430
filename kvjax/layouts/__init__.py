"""Layouts: which slot of a cache holds which position. Pure integer maths."""

from kvjax.core.validation import UNLIMITED as UNLIMITED
from kvjax.layouts.layout import Dense, Growing, Layout, Region, Run
from kvjax.layouts.paged import Paged
from kvjax.layouts.paged import paged as paged
from kvjax.layouts.paged import unpaged_layout as unpaged_layout
from kvjax.layouts.ring import Ring
from kvjax.layouts.split import Part as Part
from kvjax.layouts.split import Share as Share
from kvjax.layouts.split import Split as Split
from kvjax.layouts.split import divided as divided
from kvjax.layouts.split import shared as shared

__all__ = ["Dense", "Growing", "Layout", "Paged", "Region", "Ring", "Run"]
