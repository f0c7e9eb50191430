"""Beginnings of texts that requests share: pages that are kept, found again, and lent."""

from kvjax.prefixes.stats import PrefixStats
from kvjax.prefixes.tree import PrefixTree

__all__ = ["PrefixStats", "PrefixTree"]
