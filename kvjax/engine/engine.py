"""Continuous batching: requests come and go, and the device never waits."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

from kvjax.core.mesh_context import allow_host_to_device, without_mesh_context
from kvjax.core.validation import as_bool, as_int
from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.draft_model import draft_runner_of
from kvjax.engine.drafts import DraftPlanner
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.model_runner import ModelRunner, alike
from kvjax.engine.pool_config import DEFAULT_ROWS, engine_pool_config, max_sequence_length
from kvjax.engine.request import Request, RequestParams, asked
from kvjax.engine.results import InFlightStep, InFlightSteps
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.speculative import SpeculativeDecoder
from kvjax.engine.stats import Counters, EngineStats, counted
from kvjax.generation.aot.compiling import Compiled
from kvjax.generation.best_of import best_rows
from kvjax.generation.drafts.draft_model import DraftChoice, resolve_draft
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import check_model
from kvjax.generation.results import Timer
from kvjax.memory.limits import InferenceLimits
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.pool_config import in_bytes
from kvjax.prefixes.sequences import CachedSequences


class Engine:
    """Requests that come and go, in the rows of one paged cache: continuous batching (Yu et al.,
    Orca, OSDI 2022), with chunks of prompts between rounds of decoding (Agrawal et al.,
    Sarathi-Serve, arXiv:2403.02310) over pages (Kwon et al., arXiv:2309.06180).

    ::

        engine = kvjax.Engine(lm, limits=kvjax.memory.InferenceLimits(max_batch_size=16))
        for handle in engine.run(["The json module", "An iterator"], max_new_tokens=32):
            print(handle.text, handle.reason)

    ``submit`` takes a request at any time, and ``step`` does the next piece of work of all: it
    gives the device what is to be done next, and takes in what it has done before. Requests go by
    ``priority``, then in order. What each is given does not depend on the others: its draws go by
    its own seed and the numbers of its tokens alone, and with ``exact`` its logits are, to the last
    bit, those of the same request alone, whoever it shares a beginning or gives its memory to; but
    for one with drafts, of which the last bits go by where these were made.

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
        default what all rows can need, or nine tenths of what weights leave of the device.
      prefill_chunk: tokens of a prompt that are computed together, at most.
      step_tokens: of a step, those of padding among them; by default a chunk, and one for each row.
      decode_rounds: tokens of each row that are sent for at once, at most: stop strings, and those
        who come, wait for so many.
      exact: see above; without it few rows decode in smaller programs, CPUs multiply most of a full
        pool where it lies, and what others may share is not rounded down to whole chunks.
      prefix_cache: whether requests share beginnings; ``checkpoint_every``: as of ``PrefixTree``.
      host_memory: bytes, or text, for requests that wait, and for prefixes that leave the device.
      draft: what drafts for requests that name nothing else, as of ``generate``: a model has rows
        of its own, in pages, and keeps its parameters. CPUs draft where all rows that decode do,
        and it is worth it.
      rotary_len: as of ``init_cache``.

    Raises:
      ValueError: as of ``PrefixTree``, and of a draft; if a limit is too small for one token.
    """

    @allow_host_to_device
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
        draft: DraftChoice | None = None,
        rotary_len: int | None = None,
    ) -> None:
        check_model(lm)
        limits = InferenceLimits() if limits is None else limits
        count = limits.max_batch_size or DEFAULT_ROWS
        rounds = as_int("decode_rounds", decode_rounds, 1)
        exact = as_bool("exact", exact)
        prefix_cache = as_bool("prefix_cache", prefix_cache)
        own = resolve_draft(lm, draft)
        second = draft_runner_of(lm, own, count, max_sequence_length(lm, limits), prefill_chunk)
        self.pool_config = engine_pool_config(
            lm,
            policy,
            limits,
            pages,
            memory,
            prefill_chunk,
            rounds,
            exact,
            checkpoint_every,
            0 if second is None else second.nbytes,
            rotary_len,
        )
        least = prefill_chunk + count
        tokens = least if step_tokens is None else as_int("step_tokens", step_tokens, least)
        host = in_bytes("host_memory", host_memory)
        self._prefixes = CachedSequences(self.pool_config, (host, 0, None))
        self._runner = ModelRunner(lm, self.pool_config, self._prefixes, count, rounds, exact)
        self._cache_manager = CacheManager(self._runner, host, prefix_cache)
        self._counters = Counters()
        self._speculative = SpeculativeDecoder(self._runner, second)
        self._scheduler = Scheduler(
            self._runner, self._cache_manager, self._speculative, tokens, self._counters
        )
        self._draft_planner = DraftPlanner(
            lm, own, self._runner.platform, self._speculative.together
        )
        self._ahead = limits.prefetch_steps
        self._in_flight = InFlightSteps(self._counters, self._cache_manager.land, self._end)
        self._inbox: deque[Callable[[], Any]] = deque()
        self._numbers, self.stepping = itertools.count(1), threading.RLock()

    @without_mesh_context
    def compile(self) -> Compiled:
        """Compile all that its rows will ever run; else that is done when it is first needed, as
        is what chooses in a beam search of a width, and what scores prompts."""
        start, meter = time.perf_counter(), Timer()
        with meter.running():
            programs = self._runner.compile() + self._speculative.compile()
        return Compiled(time.perf_counter() - start, programs, meter.compilations, None)

    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        callback: Callable[[Handle], None] | None = None,
        **settings: Unpack[RequestParams],
    ) -> Handle:
        """Ask for a text, from any thread; it comes with the steps that follow.

        Args:
          prompt: a text, or token ids.
          callback: called, in the thread of ``step``, when the request has something new or ended.
          max_new_tokens, temperature, top_k, top_p, min_p, typical_p, repetition_penalty,
            frequency_penalty, presence_penalty, no_repeat_ngram_size, logit_bias, min_new_tokens,
            stop, eos_token_ids: as of ``generate``.
          seed: of its draws.
          logprobs: with each token its log-probability, and so many of the likeliest, 20 at most.
          prompt_logprobs: the same of each token of the prompt, but for the first, as
            ``Handle.prompt_logprobs``. The prompt is then read whole, whatever of it is known.
          guide: which tokens may come next: of ``Guides``, or any
            ``kvjax.generation.guides.masks.Guide``.
          draft: ``"lookup"``, or a ``PromptLookup``: as of ``generate``, of 7 tokens at most; None
            for none. By default ``"engine"``, what the engine drafts with, if that can be.
          tenant: whose prefixes it shares; by default everybody's who names none.
          priority, deadline: a whole number, lower ones go first; seconds, then it ends as it is.
          num_beams, n, length_penalty, early_stopping: a beam search, as of ``generate``: each beam
            takes a row. ``Handle.beam_results`` has its ``n`` best texts, and the handle the
            best of them, when it is at its end; who gives its memory away begins again. Penalties
            and a bias go with none, and beams and tokens that end a text are 20 together, at most.

        Raises:
          ValueError: naming what can't be, and its limit.
        """
        request = self.check(prompt, **settings)
        handle = Handle(request, next(self._numbers), self._runner.lm.tokenizer, callback)
        self._inbox.append(lambda: self._scheduler.waiting.add(handle))
        return handle

    def check(self, prompt: str | Sequence[int], **settings: Unpack[RequestParams]) -> Request:
        """What ``submit`` would have it do, or the ``ValueError`` that it would raise."""
        return asked(self._draft_planner, self.pool_config, self._runner.count, prompt, **settings)

    def cancel(self, handle: Handle) -> None:
        """End a request as it is, from any thread; its pages are free with the next step."""
        self._inbox.append(lambda: handle.done or self._end(handle, "cancelled"))

    @without_mesh_context
    def step(self) -> bool:
        """Do the next piece of work; whether there is more; of several threads each in its turn.
        Where a program can't be run, all requests end with its error, which is raised."""
        with self.stepping:
            start, waited = time.perf_counter(), self._counters.waiting_seconds
            try:
                self._step()
            except Exception as error:
                self._fail(error)
                raise
            self._counters.steps += 1
            waited -= self._counters.waiting_seconds
            self._counters.host_seconds += time.perf_counter() - start + waited
            return self.busy

    def _step(self) -> None:
        told, flight = self._take_in(), InFlightStep()
        try:
            self._scheduler.send(flight)
        finally:  # what was sent comes back, whatever stopped the rest
            self._in_flight.add(flight)
        # What waits fits alone, so that somebody can always go on.
        assert self._in_flight or told or not self._scheduler.handles, "no request goes on"
        self._in_flight.absorb(self._ahead if flight.sent else 0)

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self._in_flight or self._inbox or self._scheduler.handles)

    def run(
        self, prompts: Sequence[str | Sequence[int]], **settings: Unpack[RequestParams]
    ) -> list[Handle]:
        """Submit requests with the same settings, each with a seed one higher than the one before,
        and a copy of the guide, and step until all have ended."""
        first, handles, guide = settings.get("seed", 0), [], settings.get("guide")
        if guide is not None and len(prompts) > 1 and not hasattr(guide, "copy"):
            raise ValueError(
                "a guide of several requests has copy(): each goes along one of its own"
            )
        for number, prompt in enumerate(prompts):
            settings["seed"] = first + number
            if guide is not None and len(prompts) > 1:
                settings["guide"] = guide.copy()  # type: ignore[attr-defined]
            handles.append(self.submit(prompt, **settings))
        while not all(handle.done for handle in handles):
            self.step()
        return handles

    def best_of(
        self, prompt: str | Sequence[int], samples: int, **settings: Unpack[RequestParams]
    ) -> list[Handle]:
        """Of so many samples of a prompt, each with a seed one higher than the one before, the
        ``n`` with the highest mean log-probability, by default one, the best one first; as
        ``best_of`` of ``generate``.

        Raises:
          ValueError: as of ``submit``; if there are fewer samples than are to be the best, or a
            search.
          NonFiniteError: if logits are not finite numbers.
        """
        n = as_int("n", settings.pop("n", 1), 1)
        samples = as_int("samples", samples, n)
        if settings.get("num_beams", 1) != 1:
            raise ValueError("best_of is of samples, and num_beams of a search: give one of them")
        if settings.get("logprobs") is None:
            settings["logprobs"] = 0
        handles = self.run([prompt] * samples, **settings)
        for handle in handles:
            if handle.error is not None:
                raise handle.error
        (rows,), _ = best_rows([handle.logprobs or [] for handle in handles], samples, n)
        return [handles[row] for row in rows.tolist()]

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """A request's text as it comes, by steps that do the work of all. Who stops in the middle
        may go on later, or ``cancel`` it.

        Raises:
          NonFiniteError: if its logits are not finite numbers.
        """
        return handle.pieces(self.step, self.stepping)

    def update(self, params: Any) -> None:
        """Send other parameters from the next step on, from any thread: requests go on with them,
        on what they have, and nothing that was computed before is shared with those that come.

        Raises:
          ValueError: if they are not of the same shapes and dtypes, or elsewhere.
        """
        params = alike(params, self._runner.params)
        self._inbox.append(lambda: self._cache_manager.swap(params))

    def stats(self) -> EngineStats:
        """What it has done, and has; from any thread."""
        scheduler = self._scheduler
        return EngineStats(
            **counted(self._counters),
            **self._runner.page_tables.counted(),
            rows=self._runner.count,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            swapped_bytes=self._cache_manager.swapped,
            **self._runner.allocated,
            draft_bytes=self._speculative.draft_bytes,
        )

    def _take_in(self) -> bool:
        """What was asked from outside, and whose time is over; whether there was something."""
        found = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        for handle in (overdue := self._scheduler.overdue(time.monotonic())):
            self._end(handle, "deadline")
        return found or bool(overdue)

    def _end(self, handle: Handle, reason: str) -> None:
        """End a request, wherever it is."""
        handle.finish("error" if handle.error is not None else reason)
        self._scheduler.end(handle)
        handle.tell()

    def _fail(self, error: Exception) -> None:
        """End all requests."""
        for handle in {*self._in_flight.lost(), *self._scheduler.handles}:
            handle.error, handle.in_flight = handle.error or error, 0
            if not handle.done:
                self._end(handle, "error")
