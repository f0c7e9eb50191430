"""A radix tree of cached token sequences.

An edge is one unit of tokens. Its length is a multiple of the page size of every cache group,
because only whole pages are shared. A node has the pages of its unit, and may have a checkpoint at
the end of the unit.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104. There, edges are runs of any number of tokens.
"""

import operator
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)


class Namespace(NamedTuple):
    """A set of sequences with which a prompt is matched.

    They belong to one tenant, and were computed with one version of the weights. If results depend
    on the number of rows, they were also computed with ``rows`` rows. Otherwise ``rows`` is None.
    """

    tenant: Hashable
    weight_version: Hashable
    rows: int | None


def checked_name(what: str, name: Any) -> Hashable:
    """Check the name of a tenant or of a version of the weights. Booleans are rejected, because
    ``1`` and ``True`` would be equal names.

    Raises:
      ValueError: if ``name`` is not a string, an integer, None, or a tuple of these.
    """
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return tuple(checked_name(what, part) for part in name)
    try:
        if not isinstance(name, bool):
            return operator.index(name)
    except TypeError:
        pass
    raise ValueError(f"{what} is {name!r}; it must be a string, an integer, or a tuple of these")


class Entry:
    """The cached data of a node: one page of a cache group, or a checkpoint.

    ``page`` is the page's index in the device pool, or -1 if the data is not there. ``arrays`` is
    the data on the host. ``file`` is the data on disk, whose arrays have the dtypes and shapes in
    ``specs``. ``nbytes`` is the size of the data, which is the same in every tier.
    """

    __slots__ = ("arrays", "file", "nbytes", "page", "specs")

    def __init__(self, nbytes: int, page: int = -1) -> None:
        self.nbytes, self.page = nbytes, page
        self.arrays: list[np.ndarray] | None = None
        self.file: Path | None = None
        self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []

    @property
    def tier(self) -> str:
        """The tier in which the data is."""
        if self.page >= 0:
            return DEVICE
        return HOST if self.arrays is not None else DISK


class Node:
    """One unit of tokens, which follows the units of all its ancestors.

    ``pages`` has, for each cache group, the pages of this unit, and None for a page that is not
    cached. ``checkpoint`` is the state of a row at the end of this unit. ``depth`` is the number of
    units up to here. ``last_used`` is a time on the tree's clock. ``lock_count`` is the number of
    requests that prevent the node's eviction.
    """

    __slots__ = (
        "checkpoint",
        "children",
        "depth",
        "last_used",
        "lock_count",
        "pages",
        "parent",
        "tokens",
    )

    def __init__(self, tokens: tuple[int, ...], parent: "Node | None", shape: Sequence[int]):
        self.tokens, self.parent = tokens, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.pages: list[list[Entry | None]] = [[None] * count for count in shape]
        self.checkpoint: Entry | None = None
        self.last_used = self.lock_count = 0

    def group_of(self, entry: Entry) -> int | None:
        """Return the cache group of a page of this node; None for the checkpoint."""
        groups = (group for group, pages in enumerate(self.pages) if entry in pages)
        return next(groups, None)

    def entries(self, tier: str) -> list[Entry]:
        """Return the node's pages, and its checkpoint, as far as they are in the tier ``tier``."""
        entries = [page for pages in self.pages for page in pages if page is not None]
        if self.checkpoint is not None:
            entries.append(self.checkpoint)
        return [entry for entry in entries if entry.tier == tier]

    @property
    def empty(self) -> bool:
        """Whether neither this node nor a descendant has cached data."""
        return not (self.children or self.checkpoint) and not any(map(any, self.pages))


class RadixTree:
    """One radix tree for each namespace.

    ``node_tokens`` is the number of tokens of a node. ``shape`` is the number of a node's pages in
    each cache group.
    """

    def __init__(self, node_tokens: int, shape: Sequence[int]) -> None:
        self.node_tokens, self.shape = node_tokens, tuple(shape)
        self.roots: dict[Namespace, Node] = {}
        self.clock = 0

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from subtree(root)

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """Return the path of nodes of the longest prefix of a sequence that is in the tree, without
        the root."""
        node, path = self.roots.get(namespace), []
        for unit in self._units(tokens):
            node = None if node is None else node.children.get(unit)
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """Return the path of nodes of all whole units of a sequence. Missing nodes are created."""
        if len(tokens) < self.node_tokens:
            return []
        node = self.roots.setdefault(namespace, Node((), None, self.shape))
        path = []
        for unit in self._units(tokens):
            node = node.children.setdefault(unit, Node(unit, node, self.shape))
            path.append(node)
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """Mark nodes as just used."""
        self.clock += 1
        for node in path:
            node.last_used = self.clock

    def eviction_order(self, tier: str) -> list[tuple[Node, Entry]]:
        """Return the entries of a tier that no request locks, in the order of eviction.

        The least recently used entries come first. Entries of a sequence that were last used at the
        same time have this order: first the checkpoints of nodes with a single child, from the
        beginning to the end of the sequence, and then all other entries, from the end to the
        beginning.
        """

        def order(item: tuple[Node, Entry]) -> tuple[int, bool, int]:
            node, entry = item
            passed = entry is node.checkpoint and len(node.children) == 1
            return node.last_used, not passed, node.depth if passed else -node.depth

        unlocked = (node for node in self if not node.lock_count)
        return sorted(((n, entry) for n in unlocked for entry in n.entries(tier)), key=order)

    def prune(self, node: Node) -> None:
        """Remove a node if it is empty, and then each ancestor that becomes empty."""
        while node.parent is not None and node.empty and not node.lock_count:
            node.parent.children.pop(node.tokens, None)
            node = node.parent
        if node.parent is None and node.empty:
            self.roots = {name: root for name, root in self.roots.items() if root is not node}

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.node_tokens + 1, self.node_tokens):
            yield tuple(tokens[start : start + self.node_tokens])


def subtree(node: Node) -> Iterator[Node]:
    """Yield a node and its descendants."""
    stack = [node]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
