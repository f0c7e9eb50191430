"""Pages of an engine's requests: found, taken, shared, and given to those who come first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from kvjax.engine.flights import Landing
from kvjax.engine.parking import Parked, begin_landing
from kvjax.engine.rows import Rows
from kvjax.engine.slots import Slot
from kvjax.prefixes.checkpoints import State
from kvjax.prefixes.found import found_of
from kvjax.prefixes.nodes import Node
from kvjax.prefixes.tiers import without_the_gone

SPARE = 16
"""When texts must leave, more of them do than are wanted, such a part of the pool, so that they
are seldom looked through."""


class Memory:
    """Who has which pages.

    ``host``: bytes of the host's that requests without a row, and texts, may take; ``sharing``:
    whether requests share what they begin with; ``parked``: bytes of the host that they take;
    ``weights``: which parameters are sent.
    """

    def __init__(self, rows: Rows, host: int, sharing: bool) -> None:
        self._rows, self._texts, self._terms = rows, rows.texts, rows.terms
        self._pages, self._host, self._sharing = rows.pages, host, sharing
        self.parked = self.weights = 0
        self._coming: list[Landing] = []

    def has_room(self, wanted: list[int]) -> bool:
        """Whether so many pages of each kind are free, or were made so: texts that no request has
        leave for it."""
        counts = self._texts.pool.counts
        if all(len(each.free) >= n for each, n in zip(counts, wanted, strict=True)):
            return True
        more = [n + len(each.refs) // SPARE for each, n in zip(counts, wanted, strict=True)]
        found: bool = self._texts.tiers.make_room(wanted, more)
        self._texts.tiers.keep_limits()
        return found

    def begin(self, slot: Slot, others: Sequence[Slot]) -> bool:
        """Let a request have its row, and the pages of what is known of its prompt; whether there
        are pages for all of that, and for what the others want next. Where there are no others,
        texts that it could begin with may be what is in its way."""
        # Of what is known there are no logits.
        sharing = self._sharing and slot.handle.request.prompt_scores is None
        return self._begun(slot, others, sharing) or (
            sharing and not others and self._begun(slot, others, False)
        )

    def _begun(self, slot: Slot, others: Sequence[Slot], sharing: bool) -> bool:
        prompt, texts, terms = slot.prompt, self._texts, self._terms
        path, hit, away, state = [], 0, [], None
        if sharing:
            (found,), away, (state,) = without_the_gone(lambda: found_of(texts, slot.key, [prompt]))
            path, hit = found.path, found.hit
            slot.stops = terms.stops(hit, found.known, len(prompt))
        wanted, most, further = [], self._soon(slot, len(prompt)), self._wanted_next(others)
        for number, kind in enumerate(terms.kinds):
            coming = sum(each.kind == number for each in away)
            more = max(kind.most(most) - len(kind.needed(hit)[0]), 0)
            wanted.append(more + coming + further[number] + len(slot.others))
        with _locked(path):
            if not self.has_room(wanted):
                return False
            texts.tiers.come_back(away)
            fresh = self._pages.begin(slot.row, path, hit)
        if state is not None:
            self._rows.put_state(slot.row, state, fresh)
        slot.filled, slot.fresh = hit, state is None
        if slot.handle.request.by_text:
            self._rows.mark(slot.row, prompt)
        return True

    def _wanted_next(self, slots: Sequence[Slot]) -> list[int]:
        """A page of each kind for each of those who are to take more, or a newcomer would give it
        back at once. Beams that branch may take one at any time."""
        found = [0] * len(self._terms.kinds)
        for slot in slots:
            most = slot.handle.request.need
            wanting = self._pages.wanting(slot.row, most)
            for number, more in enumerate(wanting):
                found[number] += more or slot.handle.beams is not None
        return found

    def _soon(self, slot: Slot, filled: int) -> int:
        """Tokens that a row of so many will have with the next rounds."""
        return min(filled + self._rows.rounds, slot.handle.request.need)

    def forget_texts(self) -> None:
        """Keep nothing that requests could begin with."""
        for root in list(self._texts.nodes.roots.values()):
            self._texts.tiers.remove(root)
        self._texts.nodes.roots.clear()

    def release(self, slot: Slot) -> None:
        """Take a request's rows and pages from it."""
        for row in slot.rows:
            self._pages.release(row)
            self._rows.board.clear(row)

    def keep(self, slot: Slot) -> None:
        """Let others share what a row's prompt has come to."""
        if not self._sharing or slot.key.weights != self.weights:
            return
        key, prompt, filled, chunk = slot.key, slot.prompt, slot.filled, self._terms.prefill_chunk
        if filled in slot.stops:
            (rows, parts), _ = self._rows.take(slot.row, filled)
            arrays = jax.tree.leaves((rows, parts))
            begin_landing(arrays)
            state = State(filled, arrays, self._pages.retained(slot.row, filled))
            self._texts.keep_state(key, prompt[:filled], state)
            self._coming.append(lambda: _landed(arrays))
        whole = filled // chunk * chunk if self._rows.exact else filled
        tables = [table[slot.row] for table in self._pages.tables]
        self._texts.keep_pages(key, prompt[:whole], tables)

    def coming(self) -> list[Landing]:
        """What is on its way to the host since this was last asked."""
        found, self._coming = self._coming, []
        return found

    def land(self, landing: Sequence[Landing]) -> None:
        """Take off the device what has come by now."""
        for each in landing:
            each()
        if landing:
            self._texts.tiers.keep_limits()

    def park(self, slot: Slot) -> bool:
        """Have all that a request has on the host, if it fits; it keeps its row."""
        # One with drafts may have pages beyond its text; a search has texts that may yet be none.
        if slot.handle.drafts is not None or slot.handle.beams is not None:
            return False
        pages = self._pages.of(slot.row)
        sizes = zip(pages, self._terms.kinds, strict=True)
        nbytes = self._terms.state_bytes + sum(len(some) * kind.page_bytes for some, kind in sizes)
        if self.parked + nbytes > self._host:
            return False
        (rows, _), stands = self._rows.take(slot.row, slot.filled)
        begin_landing((rows, stands))
        contents = [
            self._texts.pool.reading(number, [page for _, page in some])
            for number, some in enumerate(pages)
        ]
        columns = [[column for column, _ in some] for some in pages]
        parked = Parked(slot.filled, slot.count, rows, stands, columns, contents, nbytes)
        slot.handle.parked = parked
        self._coming.append(parked.land)
        self._count(nbytes)
        return True

    def resume(self, slot: Slot, others: Sequence[Slot]) -> bool:
        """Let a request that was parked have its row and pages again; whether there are pages for
        that, and for what the others want next."""
        parked: Parked = slot.handle.parked
        most = self._soon(slot, parked.filled)
        each = zip(self._terms.kinds, parked.columns, self._wanted_next(others), strict=True)
        wanted = [max(len(columns), kind.most(most)) + more for kind, columns, more in each]
        if not self.has_room(wanted):
            return False
        parked.land()
        found = self._pages.take_up(slot.row, parked.columns, parked.filled)
        for number, (pages, contents) in enumerate(zip(found, parked.contents, strict=True)):
            self._texts.pool.fill(number, pages, contents())
        self._rows.put(slot.row, parked.rows, parked.stands)
        slot.filled, slot.count, slot.fresh = parked.filled, parked.count, False
        self.forget(slot.handle)
        return True

    def forget(self, handle: Any) -> None:
        """Let go what a request had parked."""
        if handle.parked is not None:
            self._count(-handle.parked.nbytes)
            handle.parked = None

    def swap(self, params: Any) -> None:
        """Send other parameters from now on: what was computed by those before is forgotten."""
        self._rows.params = params
        self._texts.forget_weights(self.weights)
        self.weights += 1

    def _count(self, nbytes: int) -> None:
        """So many bytes more of the host are requests', and none of texts."""
        self.parked += nbytes
        self._texts.tiers.limits["host"] = max(self._host - self.parked, 0)
        self._texts.tiers.keep_limits()


def _landed(arrays: list[Any]) -> None:
    arrays[:] = [np.asarray(x) for x in arrays]


@contextmanager
def _locked(path: Sequence[Node]) -> Iterator[None]:
    """While pages are looked for, a text that is gone on from can't leave; after that its pages are
    the row's too."""
    for node in path:
        node.locked += 1
    try:
        yield
    finally:
        for node in path:
            node.locked -= 1
