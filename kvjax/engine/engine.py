"""Continuous batching: requests come and go, and the device never waits."""

import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from kvjax.cache.creation import allocate
from kvjax.core.checks import whole_number
from kvjax.core.context import outside
from kvjax.core.device import fetch
from kvjax.core.errors import KvjaxError, NonFiniteError
from kvjax.engine import programs
from kvjax.engine.board import Board
from kvjax.engine.handle import Handle, TokenScore
from kvjax.engine.pages import RowPages
from kvjax.engine.parking import Parked, begin_landing
from kvjax.engine.programs import Held, Piece, Report, Rounds
from kvjax.engine.request import asked
from kvjax.engine.slots import Slot, Waiting, rank, youngest
from kvjax.engine.stats import EngineStats
from kvjax.engine.terms import engine_terms
from kvjax.generation.filters import EVERY
from kvjax.generation.model import LanguageModel, check_model
from kvjax.generation.programs import Progress
from kvjax.generation.text import RowText
from kvjax.memory.limits import InferenceLimits
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.checkpoints import State, own
from kvjax.prefixes.found import found_of
from kvjax.prefixes.nodes import Key
from kvjax.prefixes.terms import in_bytes
from kvjax.prefixes.texts import Texts
from kvjax.prefixes.tiers import without_the_gone

LEAST_WIDTH = 16
"""Tokens of the narrowest chunk of a prompt."""
FINER = 4
"""Of a chunk's width, each narrower one is such a part."""


@dataclass
class _Flight:
    """Programs that were sent together: of each its report, and of each entry of that whose it is,
    with the tokens that it had been sent for before."""

    sent: list[tuple[Report, list[tuple[int, Handle, int]]]]


class Engine:
    def __init__(
        self,
        lm: LanguageModel,
        policy: PolicyChoice = "paged",
        limits: InferenceLimits | None = None,
        *,
        pages: int | None = None,
        memory: int | str | None = None,
        prefill_chunk: int = 256,
        step_tokens: int | None = None,
        decode_rounds: int = 8,
        exact: bool = True,
        prefix_cache: bool = True,
        checkpoint_every: int = 16,
        host_memory: int | str = "1GiB",
    ) -> None:
        check_model(lm)
        self._lm = lm
        limits = InferenceLimits(max_batch_size=8) if limits is None else limits
        self._count = limits.max_batch_size or 8
        self._rounds = whole_number("decode_rounds", decode_rounds, 1)
        self.terms = engine_terms(
            lm, policy, limits, pages, memory, prefill_chunk, self._rounds, exact, checkpoint_every
        )
        least = prefill_chunk + self._count
        self._budget = (
            least if step_tokens is None else whole_number("step_tokens", step_tokens, least)
        )
        self._sharing, self._exact = prefix_cache, exact
        self._ahead = limits.prefetch_steps
        self._host = in_bytes("host_memory", host_memory)
        self._parked = 0
        self._widths = [prefill_chunk]
        while (narrower := self._widths[0] // FINER) >= LEAST_WIDTH and len(self._widths) < 3:
            self._widths.insert(0, narrower)
        self._texts = Texts(self.terms, (self._host, 0, None))
        self._weights = 0
        cache = allocate(
            lm.config, list(self.terms.policies), batch=self._count, max_len=self.terms.max_len,
            mesh=lm.mesh,
        )  # fmt: skip
        self._placement = cache.layers[0].policy.placement
        zeros = np.zeros(self._count, np.int32)
        rows: Any = (
            Progress(zeros, zeros, zeros == 0, zeros > 0),  # type: ignore[arg-type]
            np.zeros((self._count, lm.config.vocab_size), bool),
        )
        self._held = Held(replace(cache, pools=()), *self._placement.put(rows))
        self._texts.pool.take_up(cache.layers)
        self._pages = RowPages(self._texts, self._count)
        self._board = Board(self._count, self._placement)
        self._slots: list[Slot | None] = [None] * self._count
        self._waiting, self._flying = Waiting(), deque[_Flight]()
        self._inbox: deque[tuple[str, Handle]] = deque()
        self._landing: list[list[Any]] = []
        self._number = 0
        self.stats_ = EngineStats()

    def submit(self, prompt: str | Sequence[int], **settings: Any) -> Handle:
        request = asked(self._lm, self.terms, prompt, **settings)
        text = RowText(self._lm.tokenizer, request.tokens, request.stops)
        self._number += 1
        handle = Handle(request, self._number, text)
        self._inbox.append(("submit", handle))
        return handle

    def cancel(self, handle: Handle) -> None:
        self._inbox.append(("cancel", handle))

    @outside
    def step(self) -> bool:
        self._take_in()
        flight = self._send()
        if flight.sent:
            self._flying.append(flight)
        while len(self._flying) > (self._ahead if flight.sent else 0):
            self._absorb(self._flying.popleft())
        return bool(self._flying or self._waiting or self._inbox or any(self._slots))

    def run(self, prompts: Sequence[str | Sequence[int]], **settings: Any) -> list[Handle]:
        handles = [self.submit(prompt, **settings) for prompt in prompts]
        while not all(handle.done for handle in handles):
            self.step()
        return handles

    def stream(self, handle: Handle) -> Iterator[tuple[str, list[int], list[TokenScore]]]:
        while True:
            piece = handle.take()
            if piece[0] or piece[1]:
                yield piece
            elif handle.done:
                return
            else:
                self.step()

    def update(self, params: Any) -> None:
        self._lm = replace(self._lm, params=params)  # type: ignore[type-var]
        self._texts.forget_weights(self._weights)
        self._weights += 1

    # Requests in and out.

    def _take_in(self) -> None:
        while self._inbox:
            what, handle = self._inbox.popleft()
            if what == "submit":
                self._waiting.add(handle)
            else:
                self._end(handle, "cancelled")
        now = time.monotonic()
        for handle in [*self._waiting, *(slot.handle for slot in self._running)]:
            deadline = handle.request.deadline
            if deadline is not None and now - handle.times.submitted > deadline:
                self._end(handle, "deadline")

    @property
    def _running(self) -> list[Slot]:
        return [slot for slot in self._slots if slot is not None]

    def _end(self, handle: Handle, reason: str, error: KvjaxError | None = None) -> None:
        """End a request, wherever it is."""
        handle.finish(reason, error)
        self._waiting.remove(handle)
        if handle.parked is not None:
            self._parked -= handle.parked.nbytes
            handle.parked = None
        for slot in self._running:
            if slot.handle is handle:
                self._leave(slot)

    def _leave(self, slot: Slot) -> None:
        """Take a request's row and pages from it."""
        self._pages.release(slot.row)
        self._board.clear(slot.row)
        for node in slot.path:
            node.locked -= 1
        self._slots[slot.row] = None

    # Memory.

    def _find_room(self, wanted: list[int], mine: tuple[int, int]) -> bool:
        """Let so many pages of each kind be free: from texts that nobody has, or else from requests
        that come after ``mine``."""
        while not self._has_room(wanted):
            others = [slot for slot in self._running if rank(slot.handle) > mine]
            if not others:
                return False
            self._preempt(youngest(others))
        return True

    def _has_room(self, wanted: list[int]) -> bool:
        counts = self._texts.pool.counts
        if all(len(each.free) >= n for each, n in zip(counts, wanted, strict=True)):
            return True
        # More than are wanted, so that texts are seldom looked through.
        more = [n + len(each.refs) // 16 for each, n in zip(counts, wanted, strict=True)]
        found: bool = self._texts.tiers.make_room(wanted, more)
        return found

    def _preempt(self, slot: Slot) -> None:
        """Take a request's memory from it: to the host, where it fits, else to be computed again."""
        handle = slot.handle
        handle.preemptions += 1
        self.stats_.preemptions += 1
        if not slot.reading:
            pages = self._pages.of(slot.row)
            nbytes = self.terms.state_bytes + sum(
                len(some) * kind.page_bytes
                for some, kind in zip(pages, self.terms.kinds, strict=True)
            )
            if self._parked + nbytes <= self._host:
                (rows, _), stands = self._taken(slot.row, slot.filled)
                begin_landing((rows, stands))
                contents = [
                    self._texts.pool.reading(number, [page for _, page in some])
                    for number, some in enumerate(pages)
                ]
                columns = [[column for column, _ in some] for some in pages]
                handle.parked = Parked(
                    slot.filled, slot.count, rows, stands, columns, contents, nbytes
                )
                self._parked += nbytes
                self.stats_.parked += 1
        self._leave(slot)
        self._waiting.add(handle)

    # What is sent.

    def _send(self) -> _Flight:
        flight = _Flight([])
        decoding = sum(not slot.reading for slot in self._running)
        left = self._budget - decoding
        while True:
            slot = min(
                (slot for slot in self._running if slot.reading),
                key=lambda slot: rank(slot.handle), default=None,
            ) or self._admit()  # fmt: skip
            if slot is None:
                break
            if not slot.reading:
                continue
            length = min(len(slot.prompt) - slot.filled, self.terms.prefill_chunk)
            width = next(width for width in self._widths if width >= length)
            if width > left:
                break
            if not self._find_room(
                self._pages.wanted(slot.row, slot.filled + length), rank(slot.handle)
            ):
                self._preempt(slot)
                break
            self._feed(flight, slot, length, width)
            left -= width
        self._decode(flight, left + decoding)
        return flight

    def _admit(self) -> Slot | None:
        """Give the next request that waits a row, and the pages that it goes on from; None if there
        is no such row, or too few pages for it."""
        handle = self._waiting.first()
        row = next((row for row, slot in enumerate(self._slots) if slot is None), None)
        if handle is None or row is None:
            return None
        key = Key(handle.request.tenant, self._weights, 1 if self._exact else None)
        slot = Slot(handle, row, key)
        if not (self._resume(slot) if handle.parked is not None else self._begin(slot)):
            return None
        self._waiting.remove(handle)
        self._slots[row] = slot
        self._board.set(row, handle.request)
        handle.times.admitted = handle.times.admitted or time.monotonic()
        return slot

    def _begin(self, slot: Slot) -> bool:
        handle, prompt, texts = slot.handle, slot.prompt, self._texts
        if self._sharing:
            (found,), away, (state,) = without_the_gone(lambda: found_of(texts, slot.key, [prompt]))
            path, hit = found.path, found.hit
            stops = self.terms.stops(hit, found.known, len(prompt))
        else:
            path, hit, away, state, stops = [], 0, [], None, set()
        for node in path:
            node.locked += 1
        spare = len(self._running)
        wanted = []
        for number, kind in enumerate(self.terms.kinds):
            there = len(kind.needed(hit)[0])
            coming = sum(each.kind == number for each in away)
            most = kind.most(min(len(prompt) + self._rounds, len(prompt) + handle.request.limit))
            wanted.append(max(most - there, 0) + coming + spare)
        if not self._has_room(wanted):
            for node in path:
                node.locked -= 1
            return False
        texts.tiers.come_back(away)
        texts.tiers.keep_limits()
        fresh = self._pages.begin(slot.row, path, hit)
        if state is not None:
            self._put_state(slot.row, state, fresh)
        slot.path, slot.stops, slot.filled, slot.fresh = path, stops, hit, state is None
        handle.cached_tokens = hit
        self.stats_.prompt_tokens += len(prompt)
        self.stats_.cached_tokens += hit
        if handle.request.penalized:
            ids = np.full(self.terms.max_len, self._held.seen.shape[1], np.int32)
            ids[: len(prompt)] = prompt
            self._run(programs.mark, np.int32(slot.row), ids)
        return True

    def _resume(self, slot: Slot) -> bool:
        parked: Parked = slot.handle.parked
        spare = len(self._running)
        if not self._has_room([len(columns) + 1 + spare for columns in parked.columns]):
            return False
        parked.land()
        found = self._pages.take_up(slot.row, parked.columns, parked.filled)
        for number, (pages, contents) in enumerate(zip(found, parked.contents, strict=True)):
            self._texts.pool.fill(number, pages, contents())
        self._run(programs.put, np.int32(slot.row), parked.rows, parked.stands)
        slot.filled, slot.count, slot.fresh = parked.filled, parked.count, False
        self._parked -= parked.nbytes
        slot.handle.parked = None
        return True

    def _feed(self, flight: _Flight, slot: Slot, length: int, width: int) -> None:
        """Send a chunk of a prompt."""
        row, start, end = slot.row, slot.filled, slot.filled + length
        self._pages.extend(row, end)
        tokens = np.zeros((1, width), np.int32)
        tokens[0, :length] = slot.prompt[start:end]
        ends = end == len(slot.prompt)
        one = slice(row, row + 1)
        piece: Any = Piece(
            np.array([row], np.int32), tokens, np.array([length], np.int32),
            np.array([start], np.int32), tuple(table[one].copy() for table in self._pages.tables),
            np.array([slot.fresh]), np.array([ends]), np.array(slot.forced(1), np.int32),
            self._every(1), self._board.of(one),
        )  # type: ignore[arg-type]  # fmt: skip
        report = self._run(programs.feed, self._lm.architecture, self._lm.params, piece)
        slot.filled, slot.fresh = end, False
        entries = []
        if ends:
            entries.append((0, slot.handle, 0))
            slot.count = 1
        self._sent(flight, report, entries)
        self.stats_.prefilled += length
        self.stats_.padded += width - length
        self._keep(slot)
        if ends and slot.left == 0:
            self._leave(slot)

    def _keep(self, slot: Slot) -> None:
        """Let others share what a row's prompt has come to."""
        if not self._sharing or slot.key.weights != self._weights:
            return
        if slot.filled in slot.stops:
            (rows, parts), _ = self._taken(slot.row, slot.filled)
            arrays = jax.tree.leaves((rows, parts))
            begin_landing(arrays)
            tables = self._pages.retained(slot.row, slot.filled)
            self._texts.keep_state(
                slot.key, slot.prompt[: slot.filled], State(slot.filled, arrays, tables)
            )
            self._landing.append(arrays)
        whole = slot.filled
        if self._exact:
            whole = whole // self.terms.prefill_chunk * self.terms.prefill_chunk
        self._texts.keep_pages(
            slot.key, slot.prompt[:whole], [table[slot.row] for table in self._pages.tables]
        )
        # What a row reads can't leave for others.
        path = self._texts.nodes.walk(slot.key, slot.prompt[:whole])
        for node in path[len(slot.path) :]:
            node.locked += 1
            slot.path.append(node)

    def _decode(self, flight: _Flight, budget: int) -> None:
        """Send rounds of decoding of all rows that have read their prompts."""
        some = sorted((x for x in self._running if not x.reading), key=lambda x: rank(x.handle))
        if not some:
            return
        rounds = max(1, min(self._rounds, budget // len(some)))
        taking: list[tuple[Slot, int]] = []
        for slot in some:
            if self._slots[slot.row] is not slot:
                continue  # it gave its memory to an earlier one
            mine = min(rounds, slot.left)
            wanted = self._pages.wanted(slot.row, slot.filled + mine)
            if not self._find_room(wanted, rank(slot.handle)):
                self._preempt(slot)
                continue
            self._pages.extend(slot.row, slot.filled + mine)
            taking.append((slot, mine))
        taking = [(slot, mine) for slot, mine in taking if self._slots[slot.row] is slot]
        if not taking:
            return
        lengths, number = np.zeros((2, self._count), np.int32)
        forced = np.full((self._count, self._rounds), -1, np.int32)
        entries = []
        for slot, mine in taking:
            lengths[slot.row], number[slot.row] = slot.filled, mine
            forced[slot.row, :mine] = slot.forced(mine)
            entries.append((slot.row, slot.handle, slot.count))
            slot.filled += mine
            slot.count += mine
            self.stats_.decoded += mine
        call: Any = Rounds(
            lengths, number, tuple(table.copy() for table in self._pages.tables), forced,
            self._every(self._count), self._board.all(),
        )  # type: ignore[arg-type]  # fmt: skip
        report = self._run(
            programs.decode, self._lm.architecture, self._lm.params, call, exact=self._exact
        )
        self._sent(flight, report, entries)
        for slot, _ in taking:
            if slot.left == 0:
                self._leave(slot)

    def _sent(self, flight: _Flight, report: Report, entries: Any) -> None:
        for x in jax.tree.leaves(report):
            x.copy_to_host_async()
        for _, handle, _ in entries:
            handle.flying += 1
        flight.sent.append((report, entries))

    def _every(self, rows: int) -> np.ndarray:
        words = -(-self._lm.config.vocab_size // 32)
        return np.full((rows, words), EVERY, np.uint32)

    def _run(self, program: Any, *args: Any, **settings: Any) -> Any:
        """Send a program that uses up what the device has, and gives it back first."""
        self._held, report = program(self._with_pages(), *args, **settings)
        self._texts.pool.take_up(self._held.cache.layers)
        return report

    def _with_pages(self) -> Held:
        """What the device has, with the pool's pages as they are now."""
        layers = [
            layer if body is None else replace(layer, keys=body[0], values=body[1])
            for layer, body in zip(self._held.cache.layers, self._texts.pool.bodies, strict=True)
        ]
        return replace(self._held, cache=replace(self._held.cache, layers=tuple(layers)))

    def _taken(self, row: int, tokens: int) -> Any:
        """What a row has beside full pages."""
        pages = self._pages.partly(row, tokens)
        some = [(kind, page) for kind, page in zip(self.terms.kinds, pages, strict=True)
                if kind.paging.split is not None]  # fmt: skip
        return programs.take(
            self._with_pages(), np.int32(row), [np.array([page], np.int32) for _, page in some],
            splits=tuple(kind.entries for kind, _ in some),
        )  # fmt: skip

    def _put_state(self, row: int, state: list[Any], fresh: list[int]) -> None:
        """Let a row begin with what another had."""
        held = self._held
        like = [own(layer) for layer in held.cache.layers], held.cache.written
        leaves, form = jax.tree.flatten(like)
        rows = jax.tree.unflatten(form, [np.asarray(x) for x in state[: len(leaves)]])
        at = len(leaves)
        for number, kind in enumerate(self.terms.kinds):
            if kind.paging.split is None:
                continue
            bodies = [self._texts.pool.bodies[n] for n in kind.entries]
            count = len(jax.tree.leaves(bodies))
            if fresh[number] >= 0:
                part = [np.asarray(x) for x in state[at : at + count]]
                self._texts.pool.fill(number, [fresh[number]], [part])
            at += count
        no, zero = np.bool_(False), np.int32(0)
        stands = Progress(zero, zero, no, no), np.zeros(held.seen.shape[1], bool)  # type: ignore[arg-type]
        self._run(programs.put, np.int32(row), rows, stands)

    # What comes back.

    def _absorb(self, flight: _Flight) -> None:
        """Wait for what was sent, and take it in."""
        for arrays in self._landing:
            arrays[:] = [np.asarray(x) for x in arrays]
        self._landing = []
        for report, entries in flight.sent:
            found = fetch(report)
            now = time.monotonic()
            for at, handle, before in entries:
                handle.flying -= 1
                if not handle.done:
                    self._told(found, at, handle, before, now)

    def _told(self, report: Any, at: int, handle: Handle, before: int, now: float) -> None:
        count = max(int(report.count[at]) - before, 0)
        known = max(len(handle.drawn) - before, 0)
        tokens = report.tokens[at, known:count].tolist()
        scores: list[TokenScore] = []
        if handle.request.scores is not None:
            most = handle.request.scores
            for n in range(known, count):
                ids = report.scores.ids[at, n, :most].tolist()
                likeliest = report.scores.likeliest[at, n, :most].tolist()
                chosen = float(report.scores.chosen[at, n])
                scores.append(TokenScore(chosen, tuple(zip(ids, likeliest, strict=True))))
        handle.pushed(tokens, scores, now)
        if report.broken[at]:
            self._end(handle, "error", NonFiniteError(
                f"the logits are not finite numbers after {len(handle.drawn)} new tokens; nothing "
                "was drawn from them"
            ))  # fmt: skip
        elif report.done[at] and len(handle.drawn) == int(report.count[at]):
            ended = handle.drawn[-1] in handle.request.eos
            self._end(handle, "eos" if ended else "length")
        elif handle.done:
            self._end(handle, "stop")


_ = Hashable
