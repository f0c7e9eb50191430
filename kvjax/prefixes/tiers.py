"""What leaves the device's pages: to the host, to disk, and away, least recently used first."""

import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvjax.prefixes.nodes import DEVICE, DISK, HOST, Kept, Node, Nodes, below
from kvjax.prefixes.pool import Pool


class Tiers:
    """Where the numbers of a tree's nodes are, and how many bytes of each place they may take.

    ``limits``: bytes of ``"host"`` and of ``"disk"``; ``folder``: of files, which are this
    process's own and go with it; None for no disk.
    """

    def __init__(
        self, nodes: Nodes, pool: Pool, host: int, disk: int, folder: str | Path | None
    ) -> None:
        self._nodes, self._pool = nodes, pool
        self.limits = {HOST: host, DISK: disk if folder is not None else 0}
        self.bytes, self.dropped = {HOST: 0, DISK: 0}, 0
        self._files: tempfile.TemporaryDirectory[str] | None = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._files = tempfile.TemporaryDirectory(prefix="pages-", dir=folder)
        self._written = 0

    def make_room(self, wanted: Sequence[int]) -> bool:
        """Let so many pages of each kind be free; whether there are as many now. What nobody goes
        on from leaves the device for it."""
        counts = self._pool.counts
        lacking = [n - len(each.free) for n, each in zip(wanted, counts, strict=True)]
        if all(n <= 0 for n in lacking):
            return True
        leaving: list[tuple[Node, int, Kept]] = []
        for node in self._nodes.oldest(DEVICE):
            here = [
                (node, kind, page)
                for kind, pages in enumerate(node.pages)
                for page in pages
                if page is not None and page.tier == DEVICE
            ]
            if not any(lacking[kind] > 0 for _, kind, _ in here):
                continue
            for _, kind, _ in here:
                lacking[kind] -= 1
            leaving += here
            if all(n <= 0 for n in lacking):
                break
        self._leave(leaving)
        return all(len(each.free) >= n for n, each in zip(wanted, counts, strict=True))

    def come_back(self, pages: Sequence[tuple[int, Kept]]) -> None:
        """Pages, each with the number of its kind, to the device, where there is room for them."""
        for kind, counts in enumerate(self._pool.counts):
            some = [page for of, page in pages if of == kind and page.tier != DEVICE]
            contents = [self.read(page) for page in some]
            for page in some:
                self._forget(page)
                page.number = counts.take()
            self._pool.fill(kind, [page.number for page in some], contents)

    def read(self, kept: Kept) -> list[np.ndarray]:
        """What is kept on the host or on disk; it stays there."""
        if kept.arrays is not None:
            found: list[np.ndarray] = kept.arrays
            return found
        assert kept.file is not None
        with np.load(kept.file) as file:
            flat = [file[name] for name in file.files]
        forms = zip(flat, kept.forms, strict=True)
        return [np.frombuffer(x, dtype).reshape(shape) for x, (dtype, shape) in forms]

    def rest(self, kept: Kept, arrays: list[np.ndarray]) -> None:
        """Keep numbers on the host."""
        kept.arrays, kept.number = arrays, -1
        self.bytes[HOST] += kept.nbytes

    def keep_limits(self) -> None:
        """Let the host and the disk have no more than they may."""
        for tier in (HOST, DISK):
            if self.bytes[tier] <= self.limits[tier]:
                continue
            for node in self._nodes.oldest(tier):
                for kept in node.kept(tier):
                    to_disk = tier == HOST and self.limits[DISK] >= kept.nbytes
                    # What was dropped with a page before it is nowhere any more.
                    if not (to_disk and kept.arrays is not None and self._to_disk(kept)):
                        self._drop(node, kept)
                if self.bytes[tier] <= self.limits[tier]:
                    break

    def remove(self, node: Node) -> None:
        """Take a node and all behind it away, with what they keep."""
        for each in below(node):
            for kind, pages in enumerate(each.pages):
                for page in pages:
                    if page is not None:
                        self._away(page, kind)
                each.pages[kind] = [None] * len(pages)
            if each.state is not None:
                self._away(each.state)
                each.state = None
        node.children = {}
        self._nodes.prune(node)

    def _leave(self, leaving: Sequence[tuple[Node, int, Kept]]) -> None:
        """The device's pages of some nodes to the host, or away where nothing may be kept there."""
        if not any(self.limits.values()):
            for node, _, page in leaving:
                self._drop(node, page)
            return
        for kind, counts in enumerate(self._pool.counts):
            pages = [page for _, of, page in leaving if of == kind]
            numbers = [page.number for page in pages]
            for page, content in zip(pages, self._pool.contents(kind, numbers), strict=True):
                counts.release(page.number)
                self.rest(page, content)

    def _to_disk(self, kept: Kept) -> bool:
        """Whether it could be written; a disk that is full costs a text, and no request."""
        assert self._files is not None
        self._written += 1
        file = Path(self._files.name) / f"{self._written}.npz"
        kept.forms = [(x.dtype, x.shape) for x in kept.arrays]
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

    def _drop(self, node: Node, kept: Kept) -> None:
        """Without what was kept: texts can't go on behind a page that is not there, but for those
        that a window left."""
        if node.state is kept:
            self._away(kept)
            node.state = None
            self._nodes.prune(node)
            return
        for kind, pages in zip(self._pool.kinds, node.pages, strict=True):
            if kept in pages and kind.moves:
                self._away(kept, self._pool.kinds.index(kind))
                pages[pages.index(kept)] = None
                self._nodes.prune(node)
            elif kept in pages:
                self.remove(node)

    def _away(self, kept: Kept, kind: int = 0) -> None:
        self.dropped += 1
        if kept.tier == DEVICE:
            self._pool.counts[kind].release(kept.number)
        self._forget(kept)

    def _forget(self, kept: Kept) -> None:
        """Without its numbers on the host or on disk."""
        if kept.tier != DEVICE:
            self.bytes[kept.tier] -= kept.nbytes
        if kept.file is not None:
            kept.file.unlink()
        kept.number, kept.arrays, kept.file = -1, None, None
