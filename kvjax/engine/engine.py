"""The engine: continuous batching of requests in the rows of one cache."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Unpack

from jaxtyping import PyTree

from kvjax.core.mesh_context import allow_host_to_device, without_mesh_context
from kvjax.core.validation import as_bool, as_int
from kvjax.engine.cache_manager import (
    DEFAULT_ROWS,
    CacheManager,
    engine_pool_config,
    max_sequence_length,
)
from kvjax.engine.drafts import DraftPlanner
from kvjax.engine.handle import Handle, InFlightStep, InFlightSteps, Piece
from kvjax.engine.model_runner import ModelRunner, replacement_params
from kvjax.engine.request import Request, RequestOptions, RequestParams, parse_request
from kvjax.engine.scheduler import Scheduler
from kvjax.engine.speculative import SpeculativeDecoder, draft_runner_of
from kvjax.engine.stats import Counters, EngineStats
from kvjax.generation.aot.compiling import Compiled
from kvjax.generation.drafts.draft_model import DraftChoice, resolve_draft
from kvjax.generation.generator import best_rows
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import check_model
from kvjax.generation.options import explicit_signature
from kvjax.generation.results import Timer
from kvjax.memory.limits import InferenceLimits
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.pool_config import in_bytes
from kvjax.prefixes.sequences import CachedSequences


class Engine:
    """Serves many requests at the same time, with continuous batching, chunked prefill, a paged
    cache and shared prefixes.

    ``submit`` adds a request at any time. Each ``step`` dispatches programs for all requests, and
    collects the output of earlier steps. Requests with a lower ``priority`` number are scheduled
    first, and those with the same number in the order of submission.

    A request's random numbers depend only on its seed and on the indices of its tokens, not on
    other requests. With ``batch_invariant``, its logits are also bitwise the same as if it ran
    alone, whether or not it shares a prefix or is preempted. The exception is a request with
    drafts, whose logits may differ in their last bits.

    When no pages are free, cached prefixes are evicted first. Then the request that is last in the
    scheduling order is preempted: the newest of those with the highest ``priority`` number. Its
    state is swapped to the host if ``host_memory`` allows this. Otherwise the state is recomputed.
    Later the request continues where it stopped.

    Source: Yu et al., "Orca", OSDI 2022 (continuous batching); Agrawal et al., "Sarathi-Serve",
    arXiv:2403.02310 (chunked prefill); Kwon et al., "PagedAttention", arXiv:2309.06180.

    Args:
      lm: the model, on one device or on a mesh that has only a ``tensor`` axis.
      policy: the cache policy, as for ``PrefixTree``. Every layer must have pages or a window, and
        at least one must have pages.
      limits: ``max_batch_size`` is the number of rows, 8 by default. ``max_seq_len`` is the maximum
        number of tokens of a request, prompt and new tokens together; by default all positions of
        the model. If ``cache_memory_ratio`` is given, but neither ``pages`` nor ``memory``, the
        pools may take this fraction of the device memory (``device_memory``) that weights and
        temporaries leave free. When ``step`` returns, at most ``prefetch_steps`` steps are
        dispatched but not collected.
      pages: the number of pages of each pool.
      memory: the size of all pools in bytes, or as text such as ``"2GiB"``, instead of ``pages``.
        Without ``pages``, ``memory`` and ``cache_memory_ratio``, the pools have pages for all rows
        at full length. If these do not fit, the pools take nine tenths of the device memory that is
        free after the weights.
      prefill_chunk: maximum number of prompt tokens that are computed together.
      max_num_batched_tokens: maximum number of tokens in a step, including padding; by default
        ``prefill_chunk`` plus one for each row.
      decode_steps: maximum number of tokens that a row decodes in one dispatch. Stop strings and
        new requests take effect after the dispatch.
      batch_invariant: see above. If False, the decode batch is smaller when few rows are running,
        CPUs read pages in place when most of the pool is in use, and shared prefixes are not
        rounded down to whole chunks.
      prefix_cache: whether requests share prefixes.
      checkpoint_every: as for ``PrefixTree``.
      host_memory: host memory for preempted requests and evicted prefixes, in bytes or as text.
      draft: the draft of requests that do not choose one, as for ``generate``. A draft model has
        its own rows and pages, and ``update_params`` does not change its parameters. A step uses
        drafts only if all decoding requests have a draft, and only if this is expected to save
        time.
      rotary_len: as for ``init_cache``.

    Raises:
      ValueError: for the same reasons as ``PrefixTree``, if the draft does not fit the model, or if
        a limit is too small for a single token.

    Example:
      ```python
      limits = kvjax.memory.InferenceLimits(max_batch_size=4, max_seq_len=256)
      engine = kvjax.Engine(lm, limits=limits)
      for handle in engine.run(["The json module", "An iterator"], max_new_tokens=8):
          print(handle.text, handle.finish_reason)
      ```
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
        max_num_batched_tokens: int | None = None,
        decode_steps: int = 8,
        batch_invariant: bool = True,
        prefix_cache: bool = True,
        checkpoint_every: int = 16,
        host_memory: int | str = "1GiB",
        draft: DraftChoice | None = None,
        rotary_len: int | None = None,
    ) -> None:
        check_model(lm)
        limits = InferenceLimits() if limits is None else limits
        rows = limits.max_batch_size or DEFAULT_ROWS
        rounds = as_int("decode_steps", decode_steps, 1)
        exact = as_bool("batch_invariant", batch_invariant)
        prefix_cache = as_bool("prefix_cache", prefix_cache)
        engine_draft = resolve_draft(lm, draft)
        max_length = max_sequence_length(lm, limits)
        draft_runner = draft_runner_of(lm, engine_draft, rows, max_length, prefill_chunk)
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
            0 if draft_runner is None else draft_runner.nbytes,
            rotary_len,
        )
        default = prefill_chunk + rows
        tokens = (
            default
            if max_num_batched_tokens is None
            else as_int("max_num_batched_tokens", max_num_batched_tokens, default)
        )
        host_bytes = in_bytes("host_memory", host_memory)
        self._prefixes = CachedSequences(self.pool_config, (host_bytes, 0, None))
        self._runner = runner = ModelRunner(
            lm, self.pool_config, self._prefixes, rows, rounds, exact
        )
        self._cache_manager = manager = CacheManager(runner, host_bytes, prefix_cache)
        self._counters = Counters()
        self._speculative = speculative = SpeculativeDecoder(runner, draft_runner)
        self._scheduler = Scheduler(runner, manager, speculative, tokens, self._counters)
        self._draft_planner = DraftPlanner(
            lm, engine_draft, runner.platform, speculative.batch_size
        )
        self._prefetch_steps = limits.prefetch_steps
        self._in_flight = InFlightSteps(self._counters, manager.complete, self._end)
        self._inbox: deque[Callable[[], object]] = deque()
        self._numbers = itertools.count(1)
        self.stepping = threading.RLock()

    @without_mesh_context
    def compile(self) -> Compiled:
        """Compile all programs in advance. Without this call, each program is compiled when it is
        first needed.

        Two programs are always compiled when they are first needed: the selection step of a beam
        search, for each number of beams, and prefill with ``prompt_logprobs``.
        """
        start, timer = time.perf_counter(), Timer()
        with timer.running():
            programs = self._runner.compile() + self._speculative.compile()
        return Compiled(time.perf_counter() - start, programs, timer.compilations, None)

    @explicit_signature(RequestParams, RequestOptions)
    def submit(
        self,
        prompt: str | Sequence[int],
        *,
        callback: Callable[[Handle], None] | None = None,
        **settings: Unpack[RequestParams],
    ) -> Handle:
        """Add a request, from any thread. Its tokens are computed by the following steps.

        Args:
          prompt: a text, or token ids.
          callback: a function that is called with the handle, in the thread of ``step``, when the
            request has new output or has ended.
          max_new_tokens, stop, eos_token_ids: as for ``generate``.
          {sampling parameters}
          logit_bias: as for ``generate``.
          seed: the seed of the request's random numbers.
          logprobs: a number ``k``, at most 20. The log-probability of each new token and the ``k``
            most likely tokens are reported.
          prompt_logprobs: like ``logprobs``, for each prompt token after the first, in
            ``Handle.prompt_logprobs``. The whole prompt is then computed, even if a prefix of it is
            cached.
          guide: a guide from ``Guides``, or any ``kvjax.generation.guides.masks.Guide``. It
            constrains which tokens may come next.
          draft: ``"lookup"`` or a ``PromptLookup``, as for ``generate``, with at most 7 tokens;
            None for no draft. The default ``"engine"`` means the engine's draft, except in a beam
            search or with a guide that has no ``copy``, where it means none.
          tenant: requests share prefixes only with requests of the same tenant.
          priority: an integer. Lower numbers are scheduled first.
          deadline: seconds after submission at which the request ends with the tokens that it has.
          num_beams, n, length_penalty, early_stopping: settings of a beam search, as for
            ``generate``. Each beam takes a row. At the end ``Handle.beam_results`` has the ``n``
            best sequences, and the handle's tokens and text are taken from the best one. A
            preempted search starts over. Penalties and ``logit_bias`` do not work with beams. The
            sum of ``num_beams`` and the number of end tokens must be at most 20.

        Raises:
          ValueError: if an argument is wrong. The error names the argument, its value and the
            limit.
        """
        request = self.check(prompt, **settings)
        handle = Handle(request, next(self._numbers), self._runner.lm.tokenizer, callback)
        self._inbox.append(lambda: self._scheduler.waiting.add(handle))
        return handle

    @explicit_signature(RequestParams, RequestOptions)
    def check(self, prompt: str | Sequence[int], **settings: Unpack[RequestParams]) -> Request:
        """Return the request that ``submit`` would add, or raise the ``ValueError`` that it would
        raise."""
        return parse_request(
            self._draft_planner,
            self.pool_config,
            self._runner.count,
            prompt,
            RequestOptions(**settings),
        )

    def cancel(self, handle: Handle) -> None:
        """End a request with the tokens that it has, from any thread. The next step frees its
        pages."""
        self._inbox.append(lambda: handle.done or self._end(handle, "cancelled"))

    @without_mesh_context
    def step(self) -> bool:
        """Dispatch the next programs, and collect the output of earlier ones. Steps in different
        threads run one after another.

        Returns:
          Whether a request is unfinished, or output of a step has not been collected yet.

        Raises:
          Exception: if a program fails. All requests end with this error.
        """
        with self.stepping:
            start, waited = time.perf_counter(), self._counters.waiting_seconds
            try:
                self._step()
            except Exception as error:
                self._fail(error)
                raise
            self._counters.steps += 1
            waited = self._counters.waiting_seconds - waited
            self._counters.host_seconds += time.perf_counter() - start - waited
            return self.busy

    def _step(self) -> None:
        changed, step = self._process_inbox(), InFlightStep()
        try:
            self._scheduler.dispatch(step)
        finally:  # programs that were dispatched before an error are collected too
            self._in_flight.add(step)
        # Each request fits into the pools alone, so one of them always makes progress.
        assert self._in_flight or changed or not self._scheduler.handles, (
            "no request makes progress"
        )
        self._in_flight.collect(self._prefetch_steps if step.programs else 0)

    @property
    def busy(self) -> bool:
        """Whether a request is unfinished, or output of a step has not been collected yet."""
        return bool(self._in_flight or self._inbox or self._scheduler.handles)

    def run(
        self, prompts: Sequence[str | Sequence[int]], **settings: Unpack[RequestParams]
    ) -> list[Handle]:
        """Submit one request for each prompt, and call ``step`` until all have ended. Prompt ``n``
        gets the seed ``seed + n`` and a copy of the guide."""
        seed, guide, handles = settings.get("seed", 0), settings.get("guide"), []
        if guide is not None and len(prompts) > 1 and not hasattr(guide, "copy"):
            raise ValueError("several prompts need a guide with copy(), one copy for each")
        for number, prompt in enumerate(prompts):
            settings["seed"] = seed + number
            if guide is not None and len(prompts) > 1:
                settings["guide"] = guide.copy()  # type: ignore[attr-defined]
            handles.append(self.submit(prompt, **settings))
        while not all(handle.done for handle in handles):
            self.step()
        return handles

    def best_of(
        self, prompt: str | Sequence[int], samples: int, **settings: Unpack[RequestParams]
    ) -> list[Handle]:
        """Draw ``samples`` samples of a prompt, with seeds ``seed``, ``seed + 1`` and so on.

        Returns:
          The ``n`` samples with the highest mean log-probability (``n`` is 1 by default), best
          first, like ``best_of`` of ``generate``.

        Raises:
          ValueError: for the same reasons as ``submit``, if ``samples`` is less than ``n``, or for
            a beam search.
          NonFiniteError: if logits are not finite.
        """
        n = as_int("n", settings.pop("n", 1), 1)
        samples = as_int("samples", samples, n)
        if settings.get("num_beams", 1) != 1:
            raise ValueError("best_of draws samples and num_beams searches: give one of them")
        if settings.get("logprobs") is None:
            settings["logprobs"] = 0
        handles = self.run([prompt] * samples, **settings)
        for handle in handles:
            if handle.error is not None:
                raise handle.error
        (rows,), _ = best_rows([handle.logprobs or [] for handle in handles], samples, n)
        return [handles[row] for row in rows.tolist()]

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """Yield a request's output piece by piece. Each step also serves all other requests. If you
        stop iterating, you can continue later with another stream, or cancel the request.

        Raises:
          NonFiniteError: if the request's logits are not finite.
        """
        return handle.pieces(self.step, self.stepping)

    def update_params(self, params: PyTree) -> None:
        """Replace the model's parameters from the next step on, from any thread. Running requests
        continue with the new parameters and their old keys and values. Cached prefixes that the old
        parameters computed are no longer shared.

        Raises:
          ValueError: if shapes, dtypes or devices differ from the current parameters.
        """
        params = replacement_params(params, self._runner.params)
        self._inbox.append(lambda: self._cache_manager.set_params(params))

    def stats(self) -> EngineStats:
        """Return counters, and the current use of rows and memory, from any thread."""
        scheduler = self._scheduler
        return EngineStats(
            **self._counters.as_dict(),
            **self._runner.page_tables.counts(),
            **self._runner.allocated,
            rows=self._runner.count,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._inbox),
            swapped_bytes=self._cache_manager.swapped_bytes,
            draft_bytes=self._speculative.draft_bytes,
        )

    def _process_inbox(self) -> bool:
        """Handle new requests, cancellations and deadlines. Returns whether there were any."""
        changed = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        overdue = self._scheduler.overdue(time.monotonic())
        for handle in overdue:
            self._end(handle, "deadline")
        return changed or bool(overdue)

    def _end(self, handle: Handle, reason: str) -> None:
        """End a request that is waiting or running."""
        handle.finish("error" if handle.error is not None else reason)
        self._scheduler.end(handle)
        handle.notify()

    def _fail(self, error: Exception) -> None:
        """End all requests with an error."""
        for handle in {*self._in_flight.abandon(), *self._scheduler.handles}:
            handle.error, handle.in_flight = handle.error or error, 0
            if not handle.done:
                self._end(handle, "error")
