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
from kvjax.prefixes.nodes import DEVICE, DISK, HOST, Kept, Node, Nodes, below
from kvjax.prefixes.pool import Pool


class Away(NamedTuple):
    """A page of a kind of layers that is not on the device, and its numbers."""

    kind: int
    page: Kept
    contents: list[np.ndarray]


class GoneError(Exception):
    """A file that was written is not there, or not what it was; its text has been let go."""


def without_the_gone(call: Callable[[], Any]) -> Any:
    """What a call gives that reads what is kept; again, where some of it was gone."""
    while True:
        with contextlib.suppress(GoneError):
            return call()


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
            folder = expand_user(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._files = tempfile.TemporaryDirectory(prefix="pages-", dir=folder)
        self._written = 0

    def make_room(self, least: Sequence[int], wanted: Sequence[int]) -> bool:
        """Let pages of each kind be free, as many as are wanted, as far as that goes; what nobody
        goes on from leaves the device for it. Whether at least so many are: else nothing leaves."""
        free = [len(counts.free) for counts in self._pool.counts]
        leaving: list[tuple[Node, int, Kept]] = []
        lacking = sum(max(n - m, 0) for n, m in zip(wanted, free, strict=True))
        for node, page in self._nodes.oldest(DEVICE) if lacking else ():
            if not lacking:
                break
            kind = node.kind_of(page)
            # One that somebody else has too would not be free.
            alone = kind is not None and self._pool.counts[kind].refs[page.number] == 1
            if kind is not None and alone and free[kind] < wanted[kind]:
                free[kind], lacking = free[kind] + 1, lacking - 1
                leaving.append((node, kind, page))
        if any(n > m for n, m in zip(least, free, strict=True)):
            return False
        self._leave(leaving)
        return True

    def come_back(self, pages: Sequence[Away]) -> None:
        """Pages to the device, where there is room for them."""
        for kind, counts in enumerate(self._pool.counts):
            some = [each for each in pages if each.kind == kind]
            numbers = [counts.take() for _ in some]
            self._pool.fill(kind, numbers, [each.contents for each in some])
            for each, number in zip(some, numbers, strict=True):
                self._forget(each.page)
                each.page.number = number

    def read(self, node: Node, kept: Kept) -> list[np.ndarray]:
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
            forms = zip(flat, kept.forms, strict=True)
            return [np.frombuffer(x, dtype).reshape(shape) for x, (dtype, shape) in forms]
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
            warnings.warn(f"a prefix was lost: {error}", stacklevel=2)
            self._drop(node, kept)
            raise GoneError from error

    def rest(self, kept: Kept, arrays: list[np.ndarray]) -> None:
        """Keep numbers on the host."""
        kept.arrays, kept.number = arrays, -1
        self.bytes[HOST] += kept.nbytes

    def keep_limits(self) -> None:
        """Let the host and the disk have no more than they may."""
        for tier in (HOST, DISK):
            if self.bytes[tier] <= self.limits[tier]:
                continue
            for node, kept in self._nodes.oldest(tier):
                if self.bytes[tier] <= self.limits[tier]:
                    break
                if kept.tier != tier:  # dropped with a page before it
                    continue
                to_disk = tier == HOST and self.limits[DISK] >= kept.nbytes
                if not (to_disk and self._to_disk(kept)):
                    self._drop(node, kept)

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
        kind = node.kind_of(kept)
        if kind is not None and not self._pool.kinds[kind].moves:
            self.remove(node)
            return
        if kind is not None:
            self._away(kept, kind)
            pages = node.pages[kind]
            pages[pages.index(kept)] = None
        elif kept is node.state:
            self._away(kept)
            node.state = None
        self._nodes.prune(node)

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
            with contextlib.suppress(OSError):
                kept.file.unlink()
        kept.number, kept.arrays, kept.file = -1, None, None
