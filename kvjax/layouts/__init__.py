"""Layouts: which slot of a cache holds which position. Pure integer maths."""

from kvjax.core.checks import UNLIMITED as UNLIMITED
from kvjax.layouts.dense import Dense, Growing
from kvjax.layouts.layout import Layout, Region, Run
from kvjax.layouts.paged import Paged
from kvjax.layouts.paged import paged as paged
from kvjax.layouts.paged import unpaged_layout as unpaged_layout
from kvjax.layouts.part import Part as Part
from kvjax.layouts.part import Share as Share
from kvjax.layouts.part import divided as divided
from kvjax.layouts.part import shared as shared
from kvjax.layouts.ring import Ring
from kvjax.layouts.split import Split as Split

__all__ = ["Dense", "Growing", "Layout", "Paged", "Region", "Ring", "Run"]
