"""Which pages of a pool rows have: taken, shared, given back."""

from kvjax.paging.allocator import PageAllocator

__all__ = ["PageAllocator"]
