"""Codecs: how the numbers of a cache are stored. Pure functions on arrays; they know no slots."""

from kvjax.codecs.raw import Raw

__all__ = ["Raw"]
