"""Tiers of a prefix cache: pages move from the device to the host, and then to disk.

The least recently used pages move first. Pages are evicted from the last tier.
"""

import contextlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from kvjax.core.array_folder import expand_user
from kvjax.prefixes.pool import PageArrays, PagePool
from kvjax.prefixes.radix import DEVICE, DISK, HOST, Entry, Node, RadixTree, subtree

_Result = TypeVar("_Result")


class SwappedPage(NamedTuple):
    """A page that is not on the device, with the index of its cache group and its content."""

    group: int
    entry: Entry
    contents: PageArrays


class EntryLostError(Exception):
    """The file of an entry is missing or damaged. Its sequence has been evicted."""


def retry_lost_entries(call: Callable[[], _Result]) -> _Result:
    """Call a function that reads entries. Call it again if one of them was lost."""
    while True:
        with contextlib.suppress(EntryLostError):
            return call()


class Tiers:
    """Moves the entries of a radix tree between device, host and disk, within limits of bytes.

    ``limits`` has the allowed bytes of ``"host"`` and ``"disk"``, and ``bytes`` has the bytes in
    use. ``dropped`` is the number of evicted entries. Files are stored in a temporary folder that
    is created in ``folder``. None means no disk tier.
    """

    def __init__(
        self, radix: RadixTree, pool: PagePool, host: int, disk: int, folder: str | Path | None
    ) -> None:
        self._radix, self._pool = radix, pool
        self.limits = {HOST: host, DISK: disk if folder is not None else 0}
        self.bytes, self.dropped = {HOST: 0, DISK: 0}, 0
        self._files: tempfile.TemporaryDirectory[str] | None = None
        if folder is not None:
            folder = expand_user(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._files = tempfile.TemporaryDirectory(prefix="pages-", dir=folder)
        self._num_files = 0

    def free_pages(self, least: Sequence[int], target: Sequence[int]) -> bool:
        """Swap out unlocked pages until each cache group has ``target`` free pages, or as many as
        possible.

        Returns whether each group then has at least ``least`` free pages. If False, nothing is
        swapped out.
        """
        free = [len(allocator.free) for allocator in self._pool.allocators]
        swapped_out: list[tuple[Node, int, Entry]] = []
        missing = sum(max(n - m, 0) for n, m in zip(target, free, strict=True))
        for node, entry in self._radix.eviction_order(DEVICE) if missing else ():
            if not missing:
                break
            group = node.group_of(entry)
            # A page that a row shares would not become free.
            unshared = group is not None and self._pool.allocators[group].refs[entry.page] == 1
            if group is not None and unshared and free[group] < target[group]:
                free[group], missing = free[group] + 1, missing - 1
                swapped_out.append((node, group, entry))
        if any(n > m for n, m in zip(least, free, strict=True)):
            return False
        self._swap_out(swapped_out)
        return True

    def swap_in(self, pages: Sequence[SwappedPage]) -> None:
        """Move pages back to the device, whose pool must have enough free pages."""
        for group, allocator in enumerate(self._pool.allocators):
            swapped = [page for page in pages if page.group == group]
            numbers = [allocator.allocate() for _ in swapped]
            self._pool.write(group, numbers, [page.contents for page in swapped])
            for page, number in zip(swapped, numbers, strict=True):
                self._discard_copy(page.entry)
                page.entry.page = number

    def read(self, node: Node, entry: Entry) -> list[np.ndarray]:
        """Read the data of an entry that is on the host or on disk. The entry is not moved.

        Raises:
          EntryLostError: if its file is missing or damaged.
        """
        if entry.arrays is not None:
            return entry.arrays
        assert entry.file is not None
        try:
            with np.load(entry.file) as file:
                flat = [file[name] for name in file.files]
            specs = zip(flat, entry.specs, strict=True)
            return [np.frombuffer(x, dtype).reshape(shape) for x, (dtype, shape) in specs]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            warnings.warn(f"a cached prefix was lost: {error}", stacklevel=2)
            self._evict(node, entry)
            raise EntryLostError from error

    def store_on_host(self, entry: Entry, arrays: list[np.ndarray]) -> None:
        """Store the data of an entry on the host."""
        entry.arrays, entry.page = arrays, -1
        self.bytes[HOST] += entry.nbytes

    def enforce_limits(self) -> None:
        """Move or evict entries until host and disk are within their limits."""
        for tier in (HOST, DISK):
            if self.bytes[tier] <= self.limits[tier]:
                continue
            for node, entry in self._radix.eviction_order(tier):
                if self.bytes[tier] <= self.limits[tier]:
                    break
                if entry.tier != tier:  # it was already evicted together with an earlier page
                    continue
                fits_disk = tier == HOST and self.limits[DISK] >= entry.nbytes
                if not (fits_disk and self._write_to_disk(entry)):
                    self._evict(node, entry)

    def remove(self, node: Node) -> None:
        """Evict a node and its descendants."""
        for descendant in subtree(node):
            for group, pages in enumerate(descendant.pages):
                for entry in pages:
                    if entry is not None:
                        self._release(entry, group)
                descendant.pages[group] = [None] * len(pages)
            if descendant.checkpoint is not None:
                self._release(descendant.checkpoint)
                descendant.checkpoint = None
        node.children = {}
        self._radix.prune(node)

    def _swap_out(self, pages: Sequence[tuple[Node, int, Entry]]) -> None:
        """Move pages from the device to the host, or evict them if no other tier is allowed."""
        if not any(self.limits.values()):
            for node, _, entry in pages:
                self._evict(node, entry)
            return
        for group, allocator in enumerate(self._pool.allocators):
            entries = [entry for _, of_group, entry in pages if of_group == group]
            contents = self._pool.read(group, [entry.page for entry in entries])
            for entry, arrays in zip(entries, contents, strict=True):
                allocator.release(entry.page)
                self.store_on_host(entry, arrays)

    def _write_to_disk(self, entry: Entry) -> bool:
        """Move an entry from the host to disk. Returns False if this fails, for example because the
        disk is full. A failure gives only a warning, because it loses the entry but no request."""
        assert self._files is not None and entry.arrays is not None
        self._num_files += 1
        file = Path(self._files.name) / f"{self._num_files}.npz"
        entry.specs = [(x.dtype, x.shape) for x in entry.arrays]
        try:
            np.savez(file, *(np.frombuffer(x.tobytes(), np.uint8) for x in entry.arrays))
        except OSError as error:
            warnings.warn(f"a cached prefix was not written to disk: {error}", stacklevel=2)
            file.unlink(missing_ok=True)
            return False
        self._discard_copy(entry)
        entry.file = file
        self.bytes[DISK] += entry.nbytes
        return True

    def _evict(self, node: Node, entry: Entry) -> None:
        """Evict one entry. If it is a page that later tokens need, all descendants are evicted too.
        A page of a group with a window is evicted alone."""
        group = node.group_of(entry)
        if group is not None and not self._pool.groups[group].windowed:
            self.remove(node)
            return
        if group is not None:
            self._release(entry, group)
            pages = node.pages[group]
            pages[pages.index(entry)] = None
        elif entry is node.checkpoint:
            self._release(entry)
            node.checkpoint = None
        self._radix.prune(node)

    def _release(self, entry: Entry, group: int = 0) -> None:
        self.dropped += 1
        if entry.tier == DEVICE:
            self._pool.allocators[group].release(entry.page)
        self._discard_copy(entry)

    def _discard_copy(self, entry: Entry) -> None:
        """Delete an entry's data from host and disk, and clear its location."""
        if entry.tier != DEVICE:
            self.bytes[entry.tier] -= entry.nbytes
        if entry.file is not None:
            with contextlib.suppress(OSError):
                entry.file.unlink()
        entry.page, entry.arrays, entry.file = -1, None, None
