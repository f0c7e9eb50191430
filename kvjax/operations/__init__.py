"""Functions that change caches, except for writing tokens."""

from kvjax.operations.saving import SavedCache

__all__ = ["SavedCache"]
