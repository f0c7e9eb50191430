"""Pages of an engine's requests: found, taken, shared, and given to those who come first."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.core.transfer import fetch
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.results import Landing
from kvjax.engine.sequence import RunningSequence
from kvjax.prefixes.checkpoints import Checkpoint
from kvjax.prefixes.radix import Node
from kvjax.prefixes.sequences import match_prompts
from kvjax.prefixes.tiers import retry_lost_entries


@dataclass
class SwappedState:
    """What a row had.

    ``filled``, ``count``: as of its ``RunningSequence``; ``rows``, ``stands``: as ``programs.take``
    gives them; ``columns``: of each kind of layers, those of its table; ``contents``: what
    stands in their pages, of each kind, a page after the other; ``nbytes``: of all that.
    """

    filled: int
    count: int
    rows: Any
    stands: Any
    columns: list[list[int]]
    contents: list[Callable[[], list[list[np.ndarray]]]]
    nbytes: int
    landed: bool = False

    def land(self) -> None:
        """Wait for it, once, so that the device need not hold it any longer."""
        if self.landed:
            return
        self.landed = True
        self.rows, self.stands = fetch((self.rows, self.stands))
        for number, contents in enumerate(self.contents):
            found = contents()
            self.contents[number] = lambda found=found: found


def begin_landing(arrays: Any) -> None:
    """Let arrays come to the host while the device goes on."""
    for x in jax.tree.leaves(arrays):
        x.copy_to_host_async()


SPARE = 16
"""When texts must leave, more of them do than are wanted, such a part of the pool, so that they
are seldom looked through."""


class CacheManager:
    """Who has which pages.

    ``host``: bytes of the host's that requests without a row, and texts, may take; ``sharing``:
    whether requests share what they begin with; ``swapped``: bytes of the host that they take;
    ``weights``: which parameters are sent.
    """

    def __init__(self, runner: ModelRunner, host: int, sharing: bool) -> None:
        self._runner, self._prefixes, self._pool_config = (
            runner,
            runner.prefixes,
            runner.pool_config,
        )
        self._pages, self._host, self._sharing = runner.page_tables, host, sharing
        self.swapped = self.weights = 0
        self._coming: list[Landing] = []

    def has_room(self, wanted: list[int]) -> bool:
        """Whether so many pages of each kind are free, or were made so: texts that no request has
        leave for it."""
        counts = self._prefixes.pool.allocators
        if all(len(each.free) >= n for each, n in zip(counts, wanted, strict=True)):
            return True
        more = [n + len(each.refs) // SPARE for each, n in zip(counts, wanted, strict=True)]
        found: bool = self._prefixes.tiers.free_pages(wanted, more)
        self._prefixes.tiers.enforce_limits()
        return found

    def begin(self, seq: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Let a request have its row, and the pages of what is known of its prompt; whether there
        are pages for all of that, and for what the others want next. Where there are no others,
        texts that it could begin with may be what is in its way."""
        # Of what is known there are no logits.
        sharing = self._sharing and seq.handle.request.prompt_scores is None
        return self._begun(seq, others, sharing) or (
            sharing and not others and self._begun(seq, others, False)
        )

    def _begun(
        self, seq: RunningSequence, others: Sequence[RunningSequence], sharing: bool
    ) -> bool:
        prompt, texts, pool_config = seq.prompt, self._prefixes, self._pool_config
        path, hit, away, state = [], 0, [], None
        if sharing:
            (found,), away, (state,) = retry_lost_entries(
                lambda: match_prompts(texts, seq.key, [prompt])
            )
            path, hit = found.path, found.hit
            seq.stops = pool_config.checkpoint_positions(hit, found.matched, len(prompt))
        wanted, most, further = [], self._soon(seq, len(prompt)), self._wanted_next(others)
        for number, kind in enumerate(pool_config.groups):
            coming = sum(each.group == number for each in away)
            more = max(kind.max_pages(most) - len(kind.pages_for(hit)[0]), 0)
            wanted.append(more + coming + further[number] + len(seq.others))
        with _locked(path):
            if not self.has_room(wanted):
                return False
            texts.tiers.swap_in(away)
            fresh = self._pages.begin(seq.row, path, hit)
        if state is not None:
            self._runner.put_state(seq.row, state, fresh)
        seq.filled, seq.fresh = hit, state is None
        if seq.handle.request.by_text:
            self._runner.mark(seq.row, prompt)
        return True

    def _wanted_next(self, seqs: Sequence[RunningSequence]) -> list[int]:
        """A page of each kind for each of those who are to take more, or a newcomer would give it
        back at once. Beams that branch may take one at any time."""
        found = [0] * len(self._pool_config.groups)
        for seq in seqs:
            most = seq.handle.request.need
            wanting = self._pages.wanting(seq.row, most)
            for number, more in enumerate(wanting):
                found[number] += more or seq.handle.beams is not None
        return found

    def _soon(self, seq: RunningSequence, filled: int) -> int:
        """Tokens that a row of so many will have with the next rounds."""
        return min(filled + self._runner.rounds, seq.handle.request.need)

    def forget_texts(self) -> None:
        """Keep nothing that requests could begin with."""
        for root in list(self._prefixes.radix.roots.values()):
            self._prefixes.tiers.remove(root)
        self._prefixes.radix.roots.clear()

    def release(self, seq: RunningSequence) -> None:
        """Take a request's rows and pages from it."""
        for row in seq.rows:
            self._pages.release(row)
            self._runner.sampling_state.clear(row)

    def keep(self, seq: RunningSequence) -> None:
        """Let others share what a row's prompt has come to."""
        if not self._sharing or seq.key.weights != self.weights:
            return
        key, prompt, filled, chunk = (
            seq.key,
            seq.prompt,
            seq.filled,
            self._pool_config.prefill_chunk,
        )
        if filled in seq.stops:
            (rows, parts), _ = self._runner.take(seq.row, filled)
            arrays = jax.tree.leaves((rows, parts))
            begin_landing(arrays)
            state = Checkpoint(filled, arrays, self._pages.retained(seq.row, filled))
            self._prefixes.keep_checkpoint(key, prompt[:filled], state)
            self._coming.append(lambda: _landed(arrays))
        whole = filled // chunk * chunk if self._runner.exact else filled
        tables = [table[seq.row] for table in self._pages.tables]
        self._prefixes.keep_pages(key, prompt[:whole], tables)

    def coming(self) -> list[Landing]:
        """What is on its way to the host since this was last asked."""
        found, self._coming = self._coming, []
        return found

    def land(self, landing: Sequence[Landing]) -> None:
        """Take off the device what has come by now."""
        for each in landing:
            each()
        if landing:
            self._prefixes.tiers.enforce_limits()

    def swap_out(self, seq: RunningSequence) -> bool:
        """Have all that a request has on the host, if it fits; it keeps its row."""
        # One with drafts may have pages beyond its text; a search has texts that may yet be none.
        if seq.handle.drafts is not None or seq.handle.beams is not None:
            return False
        pages = self._pages.of(seq.row)
        sizes = zip(pages, self._pool_config.groups, strict=True)
        nbytes = self._pool_config.checkpoint_bytes + sum(
            len(some) * kind.page_bytes for some, kind in sizes
        )
        if self.swapped + nbytes > self._host:
            return False
        (rows, _), stands = self._runner.take(seq.row, seq.filled)
        begin_landing((rows, stands))
        contents = [
            self._prefixes.pool.start_read(number, [page for _, page in some])
            for number, some in enumerate(pages)
        ]
        columns = [[column for column, _ in some] for some in pages]
        swapped = SwappedState(seq.filled, seq.count, rows, stands, columns, contents, nbytes)
        seq.handle.swapped = swapped
        self._coming.append(swapped.land)
        self._count(nbytes)
        return True

    def swap_in(self, seq: RunningSequence, others: Sequence[RunningSequence]) -> bool:
        """Let a request that was parked have its row and pages again; whether there are pages for
        that, and for what the others want next."""
        swapped: SwappedState = seq.handle.swapped
        most = self._soon(seq, swapped.filled)
        each = zip(
            self._pool_config.groups, swapped.columns, self._wanted_next(others), strict=True
        )
        wanted = [max(len(columns), kind.max_pages(most)) + more for kind, columns, more in each]
        if not self.has_room(wanted):
            return False
        swapped.land()
        found = self._pages.take_up(seq.row, swapped.columns, swapped.filled)
        for number, (pages, contents) in enumerate(zip(found, swapped.contents, strict=True)):
            self._prefixes.pool.write(number, pages, contents())
        self._runner.put(seq.row, swapped.rows, swapped.stands)
        seq.filled, seq.count, seq.fresh = swapped.filled, swapped.count, False
        self.forget(seq.handle)
        return True

    def forget(self, handle: Any) -> None:
        """Let go what a request had parked."""
        if handle.swapped is not None:
            self._count(-handle.swapped.nbytes)
            handle.swapped = None

    def swap(self, params: Any) -> None:
        """Send other parameters from now on: what was computed by those before is forgotten."""
        self._runner.params = params
        self._prefixes.forget_weights(self.weights)
        self.weights += 1

    def _count(self, nbytes: int) -> None:
        """So many bytes more of the host are requests', and none of texts."""
        self.swapped += nbytes
        self._prefixes.tiers.limits["host"] = max(self._host - self.swapped, 0)
        self._prefixes.tiers.enforce_limits()


def _landed(arrays: list[Any]) -> None:
    arrays[:] = [np.asarray(x) for x in arrays]


@contextmanager
def _locked(path: Sequence[Node]) -> Iterator[None]:
    """While pages are looked for, a text that is gone on from can't leave; after that its pages are
    the row's too."""
    for node in path:
        node.lock_count += 1
    try:
        yield
    finally:
        for node in path:
            node.lock_count -= 1
