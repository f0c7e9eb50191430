"""What leaves the device's pages: to the host, to disk, and away, least recently used first."""

import contextlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.core.array_folder import expand_user
from kvjax.prefixes.pool import PagePool
from kvjax.prefixes.radix import DEVICE, DISK, HOST, Entry, Node, RadixTree, subtree


class SwappedPage(NamedTuple):
    """A page of a kind of layers that is not on the device, and its numbers."""

    group: int
    page: Entry
    contents: list[np.ndarray]


class EntryLostError(Exception):
    """A file that was written is not there, or not what it was; its text has been let go."""


def retry_lost_entries(call: Callable[[], Any]) -> Any:
    """What a call gives that reads what is kept; again, where some of it was gone."""
    while True:
        with contextlib.suppress(EntryLostError):
            return call()


class Tiers:
    """Where the numbers of a tree's nodes are, and how many bytes of each place they may take.

    ``limits``: bytes of ``"host"`` and of ``"disk"``; ``folder``: of files, which are this
    process's own and go with it; None for no disk.
    """

    def __init__(
        self, nodes: RadixTree, pool: PagePool, host: int, disk: int, folder: str | Path | None
    ) -> None:
        self._nodes, self._pool = nodes, pool
        self.limits = {HOST: host, DISK: disk if folder is not None else 0}
        self.bytes, self.dropped = {HOST: 0, DISK: 0}, 0
        self._files: tempfile.TemporaryDirectory[str] | None = None
        if folder is not None:
            folder = expand_user(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._files = tempfile.TemporaryDirectory(prefix="pages-", dir=folder)
        self._written = 0

    def make_room(self, least: Sequence[int], wanted: Sequence[int]) -> bool:
        """Let pages of each kind be free, as many as are wanted, as far as that goes; what nobody
        goes on from leaves the device for it. Whether at least so many are: else nothing leaves."""
        free = [len(allocator.free) for allocator in self._pool.allocators]
        leaving: list[tuple[Node, int, Entry]] = []
        lacking = sum(max(n - m, 0) for n, m in zip(wanted, free, strict=True))
        for node, page in self._nodes.eviction_order(DEVICE) if lacking else ():
            if not lacking:
                break
            group = node.group_of(page)
            # One that somebody else has too would not be free.
            alone = group is not None and self._pool.allocators[group].refs[page.page] == 1
            if group is not None and alone and free[group] < wanted[group]:
                free[group], lacking = free[group] + 1, lacking - 1
                leaving.append((node, group, page))
        if any(n > m for n, m in zip(least, free, strict=True)):
            return False
        self._swap_out(leaving)
        return True

    def swap_in(self, pages: Sequence[SwappedPage]) -> None:
        """Pages to the device, where there is room for them."""
        for group, allocator in enumerate(self._pool.allocators):
            some = [each for each in pages if each.group == group]
            numbers = [allocator.allocate() for _ in some]
            self._pool.write(group, numbers, [each.contents for each in some])
            for each, number in zip(some, numbers, strict=True):
                self._forget(each.page)
                each.page.page = number

    def read(self, node: Node, kept: Entry) -> list[np.ndarray]:
        """What is kept at a node, on the host or on disk; it stays there.

        Raises:
          GoneError: if its file is gone, or not what it was.
        """
        if kept.arrays is not None:
            found: list[np.ndarray] = kept.arrays
            return found
        assert kept.file is not None
        try:
            with np.load(kept.file) as file:
                flat = [file[name] for name in file.files]
            specs = zip(flat, kept.specs, strict=True)
            return [np.frombuffer(x, dtype).reshape(shape) for x, (dtype, shape) in specs]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            warnings.warn(f"a prefix was lost: {error}", stacklevel=2)
            self._evict(node, kept)
            raise EntryLostError from error

    def rest(self, kept: Entry, arrays: list[np.ndarray]) -> None:
        """Keep numbers on the host."""
        kept.arrays, kept.page = arrays, -1
        self.bytes[HOST] += kept.nbytes

    def enforce_limits(self) -> None:
        """Let the host and the disk have no more than they may."""
        for tier in (HOST, DISK):
            if self.bytes[tier] <= self.limits[tier]:
                continue
            for node, kept in self._nodes.eviction_order(tier):
                if self.bytes[tier] <= self.limits[tier]:
                    break
                if kept.tier != tier:  # dropped with a page before it
                    continue
                to_disk = tier == HOST and self.limits[DISK] >= kept.nbytes
                if not (to_disk and self._write_to_disk(kept)):
                    self._evict(node, kept)

    def remove(self, node: Node) -> None:
        """Take a node and all behind it away, with what they keep."""
        for each in subtree(node):
            for group, pages in enumerate(each.pages):
                for page in pages:
                    if page is not None:
                        self._release(page, group)
                each.pages[group] = [None] * len(pages)
            if each.checkpoint is not None:
                self._release(each.checkpoint)
                each.checkpoint = None
        node.children = {}
        self._nodes.prune(node)

    def _swap_out(self, leaving: Sequence[tuple[Node, int, Entry]]) -> None:
        """The device's pages of some nodes to the host, or away where nothing may be kept there."""
        if not any(self.limits.values()):
            for node, _, page in leaving:
                self._evict(node, page)
            return
        for group, allocator in enumerate(self._pool.allocators):
            pages = [page for _, of, page in leaving if of == group]
            numbers = [page.page for page in pages]
            for page, content in zip(pages, self._pool.read(group, numbers), strict=True):
                allocator.release(page.page)
                self.store_on_host(page, content)

    def _write_to_disk(self, kept: Entry) -> bool:
        """Whether it could be written; a disk that is full costs a text, and no request."""
        assert self._files is not None
        self._written += 1
        file = Path(self._files.name) / f"{self._written}.npz"
        kept.specs = [(x.dtype, x.shape) for x in kept.arrays]
        try:
            np.savez(file, *(np.frombuffer(x.tobytes(), np.uint8) for x in kept.arrays))
        except OSError as error:
            warnings.warn(f"a prefix was not kept on disk: {error}", stacklevel=2)
            file.unlink(missing_ok=True)
            return False
        self._forget(kept)
        kept.file = file
        self.bytes[DISK] += kept.nbytes
        return True

    def _evict(self, node: Node, kept: Entry) -> None:
        """Without what was kept: texts can't go on behind a page that is not there, but for those
        that a window left."""
        group = node.group_of(kept)
        if group is not None and not self._pool.groups[group].windowed:
            self.remove(node)
            return
        if group is not None:
            self._release(kept, group)
            pages = node.pages[group]
            pages[pages.index(kept)] = None
        elif kept is node.checkpoint:
            self._release(kept)
            node.checkpoint = None
        self._nodes.prune(node)

    def _release(self, kept: Entry, group: int = 0) -> None:
        self.dropped += 1
        if kept.tier == DEVICE:
            self._pool.allocators[group].release(kept.page)
        self._forget(kept)

    def _forget(self, kept: Entry) -> None:
        """Without its numbers on the host or on disk."""
        if kept.tier != DEVICE:
            self.bytes[kept.tier] -= kept.nbytes
        if kept.file is not None:
            with contextlib.suppress(OSError):
                kept.file.unlink()
        kept.page, kept.arrays, kept.file = -1, None, None
