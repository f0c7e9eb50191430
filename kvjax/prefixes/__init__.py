"""Beginnings of texts that requests share: pages that are kept, found again, and lent."""

from kvjax.prefixes.tree import PrefixStats, PrefixTree

__all__ = ["PrefixStats", "PrefixTree"]
