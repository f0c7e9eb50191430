"""A radix tree of texts, a page's tokens at a time, and what is kept at each of its nodes."""

import operator
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)


class Namespace(NamedTuple):
    """Among whose texts a prompt is looked for: of which tenant, computed by which weights, and of
    how many rows at once, None where that makes no difference."""

    tenant: Hashable
    weights: Hashable
    rows: int | None


class Entry:
    """Numbers that rest somewhere: a page of a kind of layers, or a row's state.

    ``number``: of its page in the pool, -1 where it is not there; ``arrays``: of the host, a list;
    ``file``: on disk; ``nbytes``: what it takes in any of the three.
    """

    __slots__ = ("arrays", "file", "nbytes", "page", "specs")

    def __init__(self, nbytes: int, number: int = -1) -> None:
        self.nbytes, self.page = nbytes, number
        self.arrays: Any = None
        self.file: Path | None = None
        self.specs: Any = None  # of the arrays in the file

    @property
    def tier(self) -> str:
        """Where it is."""
        if self.page >= 0:
            return DEVICE
        return HOST if self.arrays is not None else DISK


class Node:
    """The end of a page's tokens, behind those of all nodes above it.

    ``pages``: of each kind of layers those that end here or before, None for what is not kept;
    ``state``: what rows have beside pages where their text ends here; ``depth``: pages up to here;
    ``used``: when it was last, by the tree's clock; ``locked``: requests that go on from it.
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

    def group_of(self, kept: Entry) -> int | None:
        """Which kind of layers a page that is kept here is of, None if it is the state."""
        groups = (group for group, pages in enumerate(self.pages) if kept in pages)
        return next(groups, None)

    def entries(self, tier: str) -> list[Entry]:
        """What is kept here in a tier."""
        every = [page for pages in self.pages for page in pages if page is not None]
        every += [] if self.checkpoint is None else [self.checkpoint]
        return [each for each in every if each.tier == tier]

    @property
    def empty(self) -> bool:
        """Whether nothing is kept here, or behind."""
        return not (self.children or self.checkpoint) and not any(map(any, self.pages))


class RadixTree:
    """Trees of texts, a root for each key.

    ``unit``: tokens of a node; ``shape``: pages that a node has of each kind of layers.
    """

    def __init__(self, node_tokens: int, shape: Sequence[int]) -> None:
        self.node_tokens, self.shape = node_tokens, tuple(shape)
        self.roots: dict[Namespace, Node] = {}
        self.clock = 0

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from subtree(root)

    def match(self, key: Namespace, tokens: Sequence[int]) -> list[Node]:
        """The nodes along a text, from its first unit on, as far as there are some."""
        node, path = self.roots.get(key), []
        for node_tokens in self._units(tokens):
            node = None if node is None else node.children.get(node_tokens)
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, key: Namespace, tokens: Sequence[int]) -> list[Node]:
        """The nodes along all whole units of a text, made where there are none."""
        if len(tokens) < self.node_tokens:
            return []
        node = self.roots.setdefault(key, Node((), None, self.shape))
        path = []
        for node_tokens in self._units(tokens):
            node = node.children.setdefault(node_tokens, Node(node_tokens, node, self.shape))
            path.append(node)
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """Used now."""
        self.clock += 1
        for node in path:
            node.last_used = self.clock

    def eviction_order(self, tier: str) -> list[tuple[Node, Entry]]:
        """What is kept in a tier, with its node, where nobody goes on from: least recently used
        first; of one text first the states that it has passed, from its beginning on, and then from
        its end on all else."""

        def order(each: tuple[Node, Entry]) -> tuple[int, bool, int]:
            node, kept = each
            passed = kept is node.checkpoint and len(node.children) == 1
            return node.last_used, not passed, node.depth if passed else -node.depth

        found = [
            (node, kept) for node in self if not node.lock_count for kept in node.entries(tier)
        ]
        return sorted(found, key=order)

    def prune(self, node: Node) -> None:
        """Take a node away that keeps nothing, and those above it that then don't either."""
        while node.parent is not None and node.empty and not node.lock_count:
            node.parent.children.pop(node.tokens, None)
            node = node.parent
        if node.parent is None and node.empty:
            self.roots = {key: root for key, root in self.roots.items() if root is not node}

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.node_tokens + 1, self.node_tokens):
            yield tuple(tokens[start : start + self.node_tokens])


def subtree(node: Node) -> Iterator[Node]:
    """A node, and all behind it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node


def checked_name(what: str, name: Any) -> Hashable:
    """A name for a tenant, or for weights: no two that differ are equal, as 1 and True are.

    Raises:
      ValueError: if it is no text, whole number or None, nor a tuple of such.
    """
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return tuple(checked_name(what, each) for each in name)
    try:
        if not isinstance(name, bool):
            return operator.index(name)
    except TypeError:
        pass
    raise ValueError(f"{what} is {name!r}: name it by a text, a whole number, or a tuple of such")
