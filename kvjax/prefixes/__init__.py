"""Prefix caching: requests share the pages of sequences that begin alike."""

from kvjax.prefixes.tree import PrefixStats, PrefixTree

__all__ = ["PrefixStats", "PrefixTree"]
