"""Attention of queries to a cache."""

from kvjax.attention.step import Step
from kvjax.core.rotary import RotaryTable

__all__ = ["RotaryTable", "Step"]
