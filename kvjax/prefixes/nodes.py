"""A radix tree of texts, a page's tokens at a time, and what is kept at each of its nodes.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
arXiv:2312.07104, whose edges are runs of any tokens; here whole pages, for nothing else is shared.
"""

from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

DEVICE, HOST, DISK = "device", "host", "disk"
TIERS = (DEVICE, HOST, DISK)


class Key(NamedTuple):
    """Among whose texts a prompt is looked for: of which tenant, computed by which weights, and of
    how many rows at once, None where that makes no difference."""

    tenant: Hashable
    weights: Hashable
    rows: int | None


class Kept:
    """Numbers that rest somewhere: a page of a kind of layers, or a row's state.

    ``number``: of its page in the pool, -1 where it is not there; ``arrays``: of the host, a list;
    ``file``: on disk; ``nbytes``: what it takes in any of the three.
    """

    __slots__ = ("arrays", "file", "forms", "nbytes", "number")

    def __init__(self, nbytes: int, number: int = -1) -> None:
        self.nbytes, self.number = nbytes, number
        self.arrays: Any = None
        self.file: Path | None = None
        self.forms: Any = None  # of the arrays in the file

    @property
    def tier(self) -> str:
        """Where it is."""
        if self.number >= 0:
            return DEVICE
        return HOST if self.arrays is not None else DISK


class Node:
    """The end of a page's tokens, behind those of all nodes above it.

    ``pages``: of each kind of layers those that end here or before, None for what is not kept;
    ``state``: what rows have beside pages where their text ends here; ``depth``: pages up to here;
    ``used``: when it was last, by the tree's clock; ``locked``: requests that go on from it.
    """

    __slots__ = ("children", "depth", "locked", "pages", "parent", "state", "tokens", "used")

    def __init__(self, tokens: tuple[int, ...], parent: "Node | None", shape: Sequence[int]):
        self.tokens, self.parent = tokens, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[tuple[int, ...], Node] = {}
        self.pages: list[list[Kept | None]] = [[None] * count for count in shape]
        self.state: Kept | None = None
        self.used = self.locked = 0

    def kind_of(self, kept: Kept) -> int | None:
        """Which kind of layers a page that is kept here is of, None if it is the state."""
        kinds = (kind for kind, pages in enumerate(self.pages) if kept in pages)
        return next(kinds, None)

    def kept(self, tier: str) -> list[Kept]:
        """What is kept here in a tier."""
        every = [page for pages in self.pages for page in pages if page is not None]
        every += [] if self.state is None else [self.state]
        return [each for each in every if each.tier == tier]

    @property
    def empty(self) -> bool:
        """Whether nothing is kept here, or behind."""
        return not (self.children or self.state) and not any(map(any, self.pages))


class Nodes:
    """Trees of texts, a root for each key.

    ``unit``: tokens of a node; ``shape``: pages that a node has of each kind of layers.
    """

    def __init__(self, unit: int, shape: Sequence[int]) -> None:
        self.unit, self.shape = unit, tuple(shape)
        self.roots: dict[Key, Node] = {}
        self.clock = 0

    def __iter__(self) -> Iterator[Node]:
        for root in self.roots.values():
            yield from below(root)

    def walk(self, key: Key, tokens: Sequence[int]) -> list[Node]:
        """The nodes along a text, from its first unit on, as far as there are some."""
        node, path = self.roots.get(key), []
        for unit in self._units(tokens):
            node = None if node is None else node.children.get(unit)
            if node is None:
                break
            path.append(node)
        return path

    def made(self, key: Key, tokens: Sequence[int]) -> list[Node]:
        """The nodes along all whole units of a text, made where there are none."""
        if len(tokens) < self.unit:
            return []
        node = self.roots.setdefault(key, Node((), None, self.shape))
        path = []
        for unit in self._units(tokens):
            node = node.children.setdefault(unit, Node(unit, node, self.shape))
            path.append(node)
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """Used now."""
        self.clock += 1
        for node in path:
            node.used = self.clock

    def oldest(self, tier: str) -> list[tuple[Node, Kept]]:
        """What is kept in a tier, with its node, where nobody goes on from: least recently used
        first; of one text first the states that it has passed, from its beginning on, and then from
        its end on all else."""

        def order(each: tuple[Node, Kept]) -> tuple[int, bool, int]:
            node, kept = each
            passed = kept is node.state and len(node.children) == 1
            return node.used, not passed, node.depth if passed else -node.depth

        found = [(node, kept) for node in self if not node.locked for kept in node.kept(tier)]
        return sorted(found, key=order)

    def prune(self, node: Node) -> None:
        """Take a node away that keeps nothing, and those above it that then don't either."""
        while node.parent is not None and node.empty and not node.locked:
            node.parent.children.pop(node.tokens, None)
            node = node.parent
        if node.parent is None and node.empty:
            self.roots = {key: root for key, root in self.roots.items() if root is not node}

    def _units(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for start in range(0, len(tokens) - self.unit + 1, self.unit):
            yield tuple(tokens[start : start + self.unit])


def below(node: Node) -> Iterator[Node]:
    """A node, and all behind it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        yield node
