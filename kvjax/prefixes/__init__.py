"""Prefix caching: requests share the pages of common prefixes."""

from kvjax.prefixes.tree import PrefixStats, PrefixTree

__all__ = ["PrefixStats", "PrefixTree"]
