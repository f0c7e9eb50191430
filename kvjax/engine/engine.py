"""Continuous batching: requests come and go, and the device never waits."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from kvjax.core.checks import whole_number
from kvjax.core.context import outside
from kvjax.core.device import fetch
from kvjax.engine.absorbing import taken_in
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.memory import Memory
from kvjax.engine.request import Asking, asked
from kvjax.engine.rows import Rows
from kvjax.engine.scheduler import Flight, Scheduler
from kvjax.engine.stats import Counters, EngineStats, counted
from kvjax.engine.terms import DEFAULT_ROWS, engine_terms
from kvjax.generation.ahead import Compiled
from kvjax.generation.model import LanguageModel, check_model
from kvjax.generation.statistics import Meter
from kvjax.generation.text import RowText
from kvjax.memory.limits import InferenceLimits
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.terms import in_bytes
from kvjax.prefixes.texts import Texts


class Engine:
    """Requests that come and go, in the rows of one paged cache: continuous batching (Yu et al.,
    Orca, OSDI 2022), with chunks of prompts between rounds of decoding (Agrawal et al.,
    Sarathi-Serve, arXiv:2403.02310) over pages (Kwon et al., arXiv:2309.06180).

    ::

        engine = kvjax.Engine(lm, limits=kvjax.InferenceLimits(max_batch_size=16))
        for handle in engine.run(["The json module", "An iterator"], max_new_tokens=32):
            print(handle.text, handle.reason)

    ``submit`` takes a request at any time, and ``step`` does the next piece of work of all: it
    gives the device what is to be done next, and takes in what it has done before. Requests go by
    ``priority``, then in order. What each is given does not depend on the others: its draws go by
    its own seed and the numbers of its tokens alone, and with ``exact`` its logits are, to the last
    bit, those of the same request alone, whoever it shares a beginning or gives its memory to.

    Where pages run out, texts leave that no request has; then the youngest request gives its pages
    and its row away. It waits with all that it had on the host, as far as ``host_memory`` goes, or
    is computed again, and goes on where it was.

    Args:
      lm: the model; on its mesh, of ``tensor`` alone, if it has one.
      policy: as for ``PrefixTree``: layers in pages, or with windows; one at least in pages.
      limits: ``max_batch_size``: rows, by default 8; ``max_seq_len``: tokens of prompt and new
        text, by default as many as the model has positions; ``cache_memory_ratio``,
        ``device_memory``: of the pools, where neither ``pages`` nor ``memory`` is given;
        ``prefetch_steps``: steps that are sent before what they go on from has come back.
      pages: of each pool. ``memory``: in place of it, bytes, or ``"2GiB"``, that all may take. By
        default what all rows can need.
      prefill_chunk: tokens of a prompt that are computed together, at most.
      step_tokens: of a step, those of padding among them; by default a chunk, and one for each row.
      decode_rounds: tokens of each row that are sent for at once, at most: stop strings, and those
        who come, wait for so many.
      exact: see above; without it long texts are read somewhat faster on CPUs, and what others may
        share is not rounded down to whole chunks.
      prefix_cache: whether requests share what they begin with, see ``PrefixTree``.
      checkpoint_every: as of ``PrefixTree``.
      host_memory: bytes, or text, for requests that wait, and for prefixes that leave the device.

    Raises:
      ValueError: as of ``PrefixTree``; if a limit is too small for a request of one token.
    """

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
        limits = InferenceLimits() if limits is None else limits
        count = limits.max_batch_size or DEFAULT_ROWS
        rounds = whole_number("decode_rounds", decode_rounds, 1)
        for name, value in {"exact": exact, "prefix_cache": prefix_cache}.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}, and must be True or False")
        self.terms = engine_terms(
            lm, policy, limits, pages, memory, prefill_chunk, rounds, exact, checkpoint_every
        )
        least = prefill_chunk + count
        tokens = least if step_tokens is None else whole_number("step_tokens", step_tokens, least)
        host = in_bytes("host_memory", host_memory)
        self._texts = Texts(self.terms, (host, 0, None))
        self._rows = Rows(lm, self.terms, self._texts, count, rounds, exact)
        self._memory = Memory(self._rows, host, prefix_cache)
        self._counters = Counters()
        self._scheduler = Scheduler(self._rows, self._memory, tokens, self._counters)
        self._ahead = limits.prefetch_steps
        self._flying: deque[Flight] = deque()
        self._inbox: deque[Callable[[], None]] = deque()
        self._number = 0

    @outside
    def compile(self) -> Compiled:
        """Compile all that it will ever run; else that is done when it is first needed."""
        start, meter = time.perf_counter(), Meter()
        with meter.running():
            programs = self._rows.compile()
        return Compiled(time.perf_counter() - start, programs, meter.compilations, None)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        listener: Callable[[Handle], None] | None = None,
        **settings: Unpack[Asking],
    ) -> Handle:
        """Ask for a text, from any thread; it comes with the steps that follow.

        Args:
          prompt: a text, or token ids.
          listener: called, in the thread that calls ``step``, when the request has something new,
            or has ended.
          max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, logit_bias,
            min_new_tokens, stop, eos_token_ids: as of ``generate``.
          seed: of its draws.
          logprobs: with each token its log-probability, and so many of the likeliest, 20 at most.
          guide: which tokens may come next, see ``Guide``.
          tenant: whose prefixes it shares; by default everybody's who names none.
          priority: a whole number; lower ones go first.
          deadline: seconds after which it ends as it is.

        Raises:
          ValueError: naming what can't be, and its limit.
        """
        request = asked(self._rows.lm, self.terms, prompt, **settings)
        text = RowText(self._rows.lm.tokenizer, request.tokens, request.stops)
        self._number += 1
        handle = Handle(request, self._number, text, listener)
        self._inbox.append(lambda: self._scheduler.waiting.add(handle))
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request as it is, from any thread; its pages are free with the next step."""
        self._inbox.append(lambda: self._end(handle, "cancelled"))

    @outside
    def step(self) -> bool:
        """Do the next piece of work; whether there is more."""
        start, waited = time.perf_counter(), self._counters.waiting_seconds
        ended = self._take_in()
        flight = Flight()
        try:
            self._scheduler.send(flight)
        finally:  # what was sent comes back, whatever stopped the rest
            if flight.sent:
                self._flying.append(flight)
        # What waits fits alone, so that somebody can always go on.
        there = self._scheduler.waiting or self._scheduler.running
        assert flight.sent or self._flying or ended or not there, "no request goes on"
        while len(self._flying) > (self._ahead if flight.sent else 0):
            self._absorb(self._flying[0])
        self._counters.steps += 1
        waited -= self._counters.waiting_seconds
        self._counters.host_seconds += time.perf_counter() - start + waited
        return self.busy

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        scheduler = self._scheduler
        return bool(self._flying or self._inbox or scheduler.waiting or scheduler.running)

    def run(
        self, prompts: Sequence[str | Sequence[int]], **settings: Unpack[Asking]
    ) -> list[Handle]:
        """Submit requests with the same settings, each with a seed one higher than the one before,
        and step until all have ended."""
        first, handles = settings.get("seed", 0), []
        for number, prompt in enumerate(prompts):
            settings["seed"] = first + number
            handles.append(self.submit(prompt, **settings))
        while not all(handle.done for handle in handles):
            self.step()
        return handles

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """A request's text as it comes, by steps that do the work of all. Who stops in the middle
        may go on later, or ``cancel`` it.

        Raises:
          NonFiniteError: if its logits are not finite numbers.
        """
        while True:
            piece = handle.take()
            if piece.text or piece.tokens:
                yield piece
            elif not handle.done:
                self.step()
            elif handle.error is not None:
                raise handle.error
            else:
                return

    def update(self, params: Any) -> None:
        """Send other parameters from the next step on: requests go on with them, on what they have,
        and nothing that was computed before is shared with those that come.

        Raises:
          ValueError: if they are not of the same shapes and dtypes, or elsewhere.
        """
        self._rows.swap(params)
        self._memory.swapped()

    def stats(self) -> EngineStats:
        """What it has done, and has; from any thread."""
        scheduler, counts = self._scheduler, self._texts.pool.counts
        tables = self._rows.pages.tables
        pages, free = [len(each.refs) for each in counts], [len(each.free) for each in counts]
        used = [np.unique(table[table >= 0]).size for table in tables]
        return EngineStats(
            **counted(self._counters), running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox), rows=self._rows.count,
            pages=tuple(pages), free=tuple(free), used=tuple(used),
            parked_bytes=self._memory.parked,
        )  # fmt: skip

    def _take_in(self) -> bool:
        """What was asked from outside, and whose time is over; whether there was something."""
        found = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        now = time.monotonic()
        running = [slot.handle for slot in self._scheduler.running]
        for handle in [*self._scheduler.waiting, *running]:
            deadline = handle.request.deadline
            if deadline is not None and now - handle.times.submitted > deadline:
                self._end(handle, "deadline")
                found = True
        return found

    def _end(self, handle: Handle, reason: str) -> None:
        """End a request, wherever it is."""
        handle.finish("error" if handle.error is not None else reason)
        self._scheduler.end(handle)
        handle.tell()

    def _absorb(self, flight: Flight) -> None:
        """Wait for what was sent, and take it in."""
        self._memory.land()
        start = time.perf_counter()
        # Whoever is interrupted here can go on.
        reports = fetch([report for report, _ in flight.sent])
        self._counters.waiting_seconds += time.perf_counter() - start
        self._flying.popleft()
        for found, (_, entries) in zip(reports, flight.sent, strict=True):
            for at, handle, before in entries:
                handle.flying -= 1
                if handle.done:
                    continue
                count, reason = taken_in(found, at, handle, before)
                self._counters.new_tokens += count
                if reason is None and count:
                    handle.tell()
                if reason is not None or handle.error is not None:
                    self._end(handle, reason or "error")
