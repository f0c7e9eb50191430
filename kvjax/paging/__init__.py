"""Page tables: which pages of a pool each row holds."""

from kvjax.paging.allocator import PageAllocator

__all__ = ["PageAllocator"]
