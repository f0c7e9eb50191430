"""The cached sequences of a prefix tree or an engine: matching prompts, and adding sequences."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvjax.cache.creation import as_memory_error, new_layer
from kvjax.prefixes.checkpoints import Checkpoint
from kvjax.prefixes.pool import PageArrays, PagePool
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import DEVICE, TIERS, Entry, Namespace, Node, RadixTree
from kvjax.prefixes.tiers import SwappedPage, Tiers


class CachedSequences:
    """A radix tree of token sequences, the page pool on the device, and the other tiers.

    Hold ``lock`` while reading or changing any of them. ``limits`` has the bytes on the host, the
    bytes on disk, and a folder for the disk tier or None. The pool has no arrays until ``clear``
    allocates them or an engine's cache provides them.
    """

    def __init__(self, pool_config: PoolConfig, limits: tuple[int, int, str | Path | None]) -> None:
        self.pool_config, self.limits = pool_config, limits
        # The lock is reentrant, because the garbage collector may close a stream at any point, and
        # this takes the lock.
        self.lock = threading.RLock()
        self._forget()

    def clear(self) -> None:
        """Remove all sequences, and allocate a new pool.

        Raises:
          CacheMemoryError: if the pool does not fit in the device's memory.
        """
        self._forget()  # first: the old pool and the new one may not fit together
        with as_memory_error(
            lambda: (
                "the page pool does not fit into the device's memory; use fewer pages (pages, "
                "memory), shorter sequences (max_len, max_seq_len), fewer rows, or a smaller policy"
            )
        ):
            for number, layer in enumerate(self.pool_config.cache_shapes(1).layers):
                if layer.policy.page_group is not None:
                    new = new_layer(layer.policy, 1, layer.kv_heads, layer.head_dim, layer.window)
                    self.pool.bodies[number] = new.keys, new.values

    def _forget(self) -> None:
        config = self.pool_config
        self.pool = PagePool(config.groups, config.cache_shapes(1).layers)
        pages = [config.node_tokens // group.page_tokens for group in config.groups]
        self.radix = RadixTree(config.node_tokens, pages)
        self.tiers = Tiers(self.radix, self.pool, *self.limits)

    def entry(self, path: Sequence[Node], group: int, page: int) -> Entry:
        """Return the entry of a cached page."""
        entry = self._slot(path, group, page)
        assert entry is not None
        return entry

    def read_page(self, path: Sequence[Node], group: int, page: int) -> PageArrays:
        """Read the content of a page that is on the host or on disk."""
        node = path[page // self.radix.shape[group]]
        return self.tiers.read(node, self.entry(path, group, page))

    def can_resume(self, path: Sequence[Node], depth: int) -> bool:
        """Return whether a sequence can be resumed after the first ``depth`` nodes of its path."""
        config = self.pool_config
        tokens = depth * config.node_tokens
        has_checkpoint = not config.needs_checkpoints or path[depth - 1].checkpoint is not None
        if tokens % config.hit_multiple or not has_checkpoint:
            return False
        return all(
            self._slot(path, number, page) is not None
            for number, group in enumerate(config.groups)
            for page in group.pages_for(tokens)[0]
        )

    def read_checkpoint(self, path: Sequence[Node]) -> list[np.ndarray] | None:
        """Read the arrays of the checkpoint at the end of a path; None without a checkpoint."""
        entry = path[-1].checkpoint if path else None
        return None if entry is None else self.tiers.read(path[-1], entry)

    def keep_checkpoint(
        self, namespace: Namespace, tokens: Sequence[int], checkpoint: Checkpoint
    ) -> None:
        """Add a checkpoint at the end of a sequence, and the pages of windows that it needs."""
        path = self.radix.insert(namespace, tokens)
        self.radix.touch(path)
        if path[-1].checkpoint is None:
            path[-1].checkpoint = Entry(self.pool_config.checkpoint_bytes)
            self.tiers.store_on_host(path[-1].checkpoint, checkpoint.arrays)
        groups = zip(self.pool_config.groups, checkpoint.tables, strict=True)
        for number, (group, table) in enumerate(groups):
            if table is not None:
                for page in group.pages_for(len(tokens))[0]:
                    self._keep(path, number, page, int(table[group.column(page)]))

    def keep_pages(
        self, namespace: Namespace, tokens: Sequence[int], tables: Sequence[np.ndarray]
    ) -> None:
        """Add the full pages of a row, in the groups without a window. ``tables`` has the row's
        page table in each cache group."""
        path = self.radix.insert(namespace, tokens)
        self.radix.touch(path)
        length = len(path) * self.pool_config.node_tokens
        for number, (group, table) in enumerate(zip(self.pool_config.groups, tables, strict=True)):
            for page in () if group.windowed else group.pages_for(length)[0]:
                self._keep(path, number, page, int(table[group.column(page)]))
        if path:
            self.radix.prune(path[-1])

    def forget_weights(self, weight_version: Hashable) -> None:
        """Remove the sequences that were computed with a version of the weights."""
        for namespace in [
            name for name in self.radix.roots if name.weight_version == weight_version
        ]:
            self.tiers.remove(self.radix.roots.pop(namespace))

    def usage(self) -> tuple[int, dict[str, int], list[int]]:
        """Return the number of sequences, the bytes in each tier, and the number of cached pages of
        each pool."""
        count, nbytes = 0, dict.fromkeys(map(str, TIERS), 0)
        cached = [0] * len(self.pool_config.groups)
        for node in self.radix:
            count += node.parent is not None and not node.children
            for tier in TIERS:
                nbytes[tier] += sum(entry.nbytes for entry in node.entries(tier))
            for group, pages in enumerate(node.pages):
                cached[group] += sum(page is not None and page.tier == DEVICE for page in pages)
        return count, nbytes, cached

    def _keep(self, path: Sequence[Node], group: int, page: int, pool_page: int) -> None:
        """Add a page of the pool to the tree, unless the tree already has this page of the
        sequence."""
        per_node = self.radix.shape[group]
        pages = path[page // per_node].pages[group]
        if pages[page % per_node] is None and pool_page >= 0:
            pages[page % per_node] = Entry(self.pool_config.groups[group].page_bytes, pool_page)
            self.pool.allocators[group].retain(pool_page)

    def _slot(self, path: Sequence[Node], group: int, page: int) -> Entry | None:
        per_node = self.radix.shape[group]
        return path[page // per_node].pages[group][page % per_node]


@dataclass
class PrefixMatch:
    """The cached prefix of one prompt.

    Attributes:
      tokens: the prompt.
      path: the nodes of the prefix from which the prompt is resumed.
      hit: the number of tokens of this prefix.
      matched: the number of tokens that the prompt has in common with a cached sequence.
      checkpoint_positions: the positions at which checkpoints are taken while it is prefilled.
    """

    tokens: list[int]
    path: list[Node]
    hit: int
    matched: int
    checkpoint_positions: set[int] = field(default_factory=set)


def match_prompts(
    sequences: CachedSequences, namespace: Namespace, prompts: Sequence[list[int]]
) -> tuple[list[PrefixMatch], list[SwappedPage], list[list[np.ndarray] | None]]:
    """Match the prompts of one request.

    Returns:
      The match of each prompt, all matched pages that are not on the device, and the arrays of the
      checkpoint from which each prompt is resumed; None for a prompt without one.

    Raises:
      EntryLostError: if a file is missing or damaged.
    """
    matches = [_match(sequences, namespace, tokens) for tokens in prompts]
    if sequences.pool_config.exact_prefix:
        _align(sequences, matches)
    swapped: dict[int, SwappedPage] = {}
    for number, group in enumerate(sequences.pool_config.groups):
        for match in matches:
            for page in group.pages_for(match.hit)[0]:
                entry = sequences.entry(match.path, number, page)
                if entry.page < 0 and id(entry) not in swapped:
                    contents = sequences.read_page(match.path, number, page)
                    swapped[id(entry)] = SwappedPage(number, entry, contents)
    states = [sequences.read_checkpoint(match.path) for match in matches]
    return matches, list(swapped.values()), states


def _match(sequences: CachedSequences, namespace: Namespace, tokens: list[int]) -> PrefixMatch:
    """Find the longest prefix from which a prompt can be resumed. The last token is never matched,
    because its logits must be computed."""
    node_tokens = sequences.pool_config.node_tokens
    path = sequences.radix.match(namespace, tokens[: len(tokens) - 1])
    sequences.radix.touch(path)
    depth = next((n for n in range(len(path), 0, -1) if sequences.can_resume(path, n)), 0)
    return PrefixMatch(tokens, path[:depth], depth * node_tokens, len(path) * node_tokens)


def _align(sequences: CachedSequences, matches: Sequence[PrefixMatch]) -> None:
    """Shorten all hits to a common length. The remaining prefill calls are then the same as without
    a prefix cache."""
    node_tokens = sequences.pool_config.node_tokens
    common = min(match.hit for match in matches) // node_tokens
    while common and not all(sequences.can_resume(match.path, common) for match in matches):
        common -= 1
    for match in matches:
        match.path, match.hit = match.path[:common], common * node_tokens
