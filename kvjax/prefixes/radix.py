"""A radix tree of cached token sequences.

An edge is one unit of tokens, a multiple of the page size of every cache group, because only whole
pages are shared. A node keeps the pages that end with its unit, and perhaps a checkpoint.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104, where edges are runs of any number of tokens.
"""

import operator
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)


class Namespace(NamedTuple):
    """A set of sequences that a prompt is matched against. They belong to one tenant, and were
    computed with one version of the weights and, where results depend on it, with one number of
    rows (else None)."""

    tenant: Hashable
    weight_version: Hashable
    rows: int | None


def checked_name(what: str, name: Any) -> Hashable:
    """Check the name of a tenant or of a version of the weights. Names of different values are
    never equal, as ``1`` and ``True`` are in Python.

    Raises:
      ValueError: if it is not a string, an integer, None, or a tuple of these.
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
    """Cached data at a node: one page of a cache group, or a checkpoint.

    ``page``: the page's index in the device pool, -1 if the data is not there; ``arrays``: the data
    on the host; ``file``: the data on disk, whose arrays have these ``specs`` (dtype and shape);
    ``nbytes``: its size, the same in every tier.
    """

    __slots__ = ("arrays", "file", "nbytes", "page", "specs")

    def __init__(self, nbytes: int, page: int = -1) -> None:
        self.nbytes, self.page = nbytes, page
        self.arrays: list[np.ndarray] | None = None
        self.file: Path | None = None
        self.specs: list[tuple[np.dtype, tuple[int, ...]]] = []

    @property
    def tier(self) -> str:
        """Where the data is."""
        if self.page >= 0:
            return DEVICE
        return HOST if self.arrays is not None else DISK


class Node:
    """One unit of tokens that follows the units of all its ancestors.

    ``pages``: for each cache group, the pages of this unit, None where none is cached;
    ``checkpoint``: the row state at the end of this unit; ``depth``: units up to here;
    ``last_used``: on the tree's clock; ``lock_count``: requests that prevent its eviction.
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
        """The cache group of a page of this node; None for the checkpoint."""
        groups = (group for group, pages in enumerate(self.pages) if entry in pages)
        return next(groups, None)

    def entries(self, tier: str) -> list[Entry]:
        """The node's pages and checkpoint that are in a tier."""
        entries = [page for pages in self.pages for page in pages if page is not None]
        if self.checkpoint is not None:
            entries.append(self.checkpoint)
        return [entry for entry in entries if entry.tier == tier]

    @property
    def empty(self) -> bool:
        """Whether neither this node nor a descendant keeps anything."""
        return not (self.children or self.checkpoint) and not any(map(any, self.pages))


class RadixTree:
    """One radix tree for each namespace.

    ``node_tokens``: tokens of a node; ``shape``: a node's pages in each cache group.
    """

    def __init__(self, node_tokens: int, shape: Sequence[int]) -> None:
        self.node_tokens, self.shape = node_tokens, tuple(shape)
        self.roots: dict[Namespace, Node] = {}
        self.clock = 0

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from subtree(root)

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """The path of the longest prefix of a sequence that has nodes, without the root."""
        node, path = self.roots.get(namespace), []
        for unit in self._units(tokens):
            node = None if node is None else node.children.get(unit)
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, namespace: Namespace, tokens: Sequence[int]) -> list[Node]:
        """The path of all whole units of a sequence; missing nodes are created."""
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
        """The entries of a tier that no request locks, the first to evict first: by least recent
        use; within one sequence, checkpoints that have been passed from the start on, then the rest
        from the end back."""

        def order(item: tuple[Node, Entry]) -> tuple[int, bool, int]:
            node, entry = item
            passed = entry is node.checkpoint and len(node.children) == 1
            return node.last_used, not passed, node.depth if passed else -node.depth

        unlocked = (node for node in self if not node.lock_count)
        return sorted(((n, entry) for n in unlocked for entry in n.entries(tier)), key=order)

    def prune(self, node: Node) -> None:
        """Remove a node if it is empty, then its ancestors that this leaves empty."""
        while node.parent is not None and node.empty and not node.lock_count:
            node.parent.children.pop(node.tokens, None)
            node = node.parent
        if node.parent is None and node.empty:
            self.roots = {name: root for name, root in self.roots.items() if root is not node}

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.node_tokens + 1, self.node_tokens):
            yield tuple(tokens[start : start + self.node_tokens])


def subtree(node: Node) -> Iterator[Node]:
    """A node and its descendants."""
    stack = [node]
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        yield node
