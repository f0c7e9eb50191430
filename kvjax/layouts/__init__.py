"""Layouts: which slot of a cache holds which position. Pure integer maths."""

from kvjax.layouts.dense import Dense, Growing
from kvjax.layouts.layout import UNLIMITED, Layout, Region, Run
from kvjax.layouts.ring import Ring

__all__ = ["UNLIMITED", "Dense", "Growing", "Layout", "Region", "Ring", "Run"]
