"""The texts that a tree keeps: where their numbers are, and which can be gone on from."""

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.creation import as_memory_error, new_layer
from kvjax.prefixes.checkpoints import Checkpoint
from kvjax.prefixes.pool import PagePool
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import DEVICE, TIERS, Entry, Namespace, Node, RadixTree
from kvjax.prefixes.tiers import SwappedPage, Tiers


class CachedSequences:
    """``nodes``, by the texts' tokens; ``pool``, of their pages on the device; ``tiers``, of what
    is elsewhere.

    ``limits``: bytes of the host and of the disk, and the folder of files there, or None; ``lock``:
    held while a thread reads or changes them. The pool has no arrays until ``clear`` makes them, or
    an engine's rows bring theirs.
    """

    def __init__(self, config: PoolConfig, limits: tuple[int, int, str | Path | None]) -> None:
        self.pool_config, self.limits = config, limits
        # A stream that is let go ends wherever garbage is found: perhaps in what has the lock.
        self.lock = threading.RLock()
        self._forget()

    def clear(self) -> None:
        """Forget them all, in a pool of its own.

        Raises:
          CacheMemoryError: if the device has no memory for the pool.
        """
        self._forget()  # first: the old pool and the new one may not fit together
        with as_memory_error(
            lambda: (
                "there is no memory for the pool's pages; give fewer (pages, memory), fewer tokens "
                "(max_seq_len, max_len), fewer rows, or a policy that takes less"
            )
        ):
            for number, held in enumerate(self.pool_config.cache_shapes(1).layers):
                if held.policy.page_group is not None:
                    new = new_layer(held.policy, 1, held.kv_heads, held.head_dim, held.window)
                    self.pool.bodies[number] = new.keys, new.values

    def _forget(self) -> None:
        config = self.pool_config
        self.pool = PagePool(config.groups, config.cache_shapes(1).layers)
        self.radix = RadixTree(
            config.node_tokens, [config.node_tokens // group.page_tokens for group in config.groups]
        )
        self.tiers = Tiers(self.radix, self.pool, *self.limits)

    def entry(self, path: Sequence[Node], group: int, page: int) -> Entry:
        """A page of a text that is known to be there."""
        found = self._page(path, group, page)
        assert found is not None
        return found

    def read_page(self, path: Sequence[Node], group: int, page: int) -> list[np.ndarray]:
        """What stands in a page of a text that is not on the device."""
        return self.tiers.read(path[page // self.radix.shape[group]], self.entry(path, group, page))

    def can_resume(self, path: Sequence[Node], units: int) -> bool:
        """Whether a text can go on behind so many of the units along a path."""
        config = self.pool_config
        tokens = units * config.node_tokens
        has_checkpoint = not config.needs_checkpoints or path[units - 1].checkpoint is not None
        if tokens % config.hit_multiple or not has_checkpoint:
            return False
        return all(
            self._page(path, number, page) is not None
            for number, group in enumerate(config.groups)
            for page in group.pages_for(tokens)[0]
        )

    def read_checkpoint(self, path: Sequence[Node]) -> Any:
        """What rows have beside pages at the end of a path, None where there is nothing."""
        kept = path[-1].checkpoint if path else None
        return None if kept is None else self.tiers.read(path[-1], kept)

    def keep_checkpoint(self, key: Namespace, text: Sequence[int], state: Checkpoint) -> None:
        """Keep what a row had beside full pages at the end of a text, and the pages of windows."""
        path = self.radix.insert(key, text)
        self.radix.touch(path)
        if path[-1].checkpoint is None:
            path[-1].checkpoint = Entry(self.pool_config.checkpoint_bytes)
            self.tiers.store_on_host(path[-1].checkpoint, state.arrays)
        for number, (group, table) in enumerate(
            zip(self.pool_config.groups, state.tables, strict=True)
        ):
            if table is not None:
                for page in group.pages_for(len(text))[0]:
                    self._keep(path, number, page, int(table[group.column(page)]))

    def keep_pages(self, key: Namespace, text: Sequence[int], tables: Sequence[np.ndarray]) -> None:
        """Keep the full pages of a row's text that no window leaves, by its tables."""
        path = self.radix.insert(key, text)
        self.radix.touch(path)
        for number, (group, table) in enumerate(zip(self.pool_config.groups, tables, strict=True)):
            for page in (
                ()
                if group.windowed
                else group.pages_for(len(path) * self.pool_config.node_tokens)[0]
            ):
                self._keep(path, number, page, int(table[group.column(page)]))
        if path:
            self.radix.prune(path[-1])

    def forget_weights(self, weights: Hashable) -> None:
        """Let the texts of such weights go."""
        for key in [key for key in self.radix.roots if key.weights == weights]:
            self.tiers.remove(self.radix.roots.pop(key))

    def usage(self) -> tuple[int, dict[str, int], list[int]]:
        """Ends of texts, bytes by tier, and pages of each pool that are kept."""
        ends, nbytes, cached = (
            0,
            dict.fromkeys(map(str, TIERS), 0),
            [0] * len(self.pool_config.groups),
        )
        for node in self.radix:
            ends += node.parent is not None and not node.children
            for tier in TIERS:
                nbytes[tier] += sum(kept.nbytes for kept in node.entries(tier))
            for group, pages in enumerate(node.pages):
                cached[group] += sum(page is not None and page.tier == DEVICE for page in pages)
        return ends, nbytes, cached

    def _keep(self, path: Sequence[Node], group: int, page: int, number: int) -> None:
        each = self.radix.shape[group]
        pages = path[page // each].pages[group]
        if pages[page % each] is None and number >= 0:
            pages[page % each] = Entry(self.pool_config.groups[group].page_bytes, number)
            self.pool.allocators[group].retain(number)

    def _page(self, path: Sequence[Node], group: int, page: int) -> Entry | None:
        each = self.radix.shape[group]
        return path[page // each].pages[group][page % each]


@dataclass
class PrefixMatch:
    """A prompt: the nodes of what was found, which can be gone on from, its tokens, those that
    other texts begin with too, and where its state is to be taken."""

    tokens: list[int]
    path: list[Node]
    hit: int
    known: int
    checkpoint_positions: set[int] = field(default_factory=set)


def match_prompts(
    sequences: CachedSequences, key: Namespace, prompts: Sequence[list[int]]
) -> tuple[list[PrefixMatch], list[SwappedPage], list[Any]]:
    """What there is of each prompt: the pages of it that are not on the device, and the states that
    rows go on from, None where there is nothing.

    Raises:
      GoneError: if a file is not there any more.
    """
    rows = [_row(sequences, key, tokens) for tokens in prompts]
    if sequences.pool_config.exact_prefix:
        _begin_together(sequences, rows)
    away: dict[int, SwappedPage] = {}
    for number, group in enumerate(sequences.pool_config.groups):
        for row in rows:
            for page in group.pages_for(row.hit)[0]:
                kept = sequences.entry(row.path, number, page)
                if kept.page < 0 and id(kept) not in away:
                    away[id(kept)] = SwappedPage(
                        number, kept, sequences.read_page(row.path, number, page)
                    )
    return rows, list(away.values()), [sequences.read_checkpoint(row.path) for row in rows]


def _row(sequences: CachedSequences, key: Namespace, tokens: list[int]) -> PrefixMatch:
    """What there is of a prompt; a token at least is left, whose logits are asked for."""
    node_tokens = sequences.pool_config.node_tokens
    path = sequences.radix.match(key, tokens[: len(tokens) - 1])
    sequences.radix.touch(path)
    hit = next((n for n in range(len(path), 0, -1) if sequences.can_resume(path, n)), 0)
    return PrefixMatch(tokens, path[:hit], hit * node_tokens, len(path) * node_tokens)


def _begin_together(sequences: CachedSequences, rows: Sequence[PrefixMatch]) -> None:
    """Let all rows begin at the same position: then their calls are those of the request without a
    tree, as far as they are made."""
    node_tokens = sequences.pool_config.node_tokens
    common = min(row.hit for row in rows) // node_tokens
    while common and not all(sequences.can_resume(row.path, common) for row in rows):
        common -= 1
    for row in rows:
        row.path, row.hit = row.path[:common], common * node_tokens
