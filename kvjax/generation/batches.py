"""Generate for one batch after another, while a second thread prepares the next batches."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Unpack

import jax

from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import DONATED, ArgumentError, check_not_donated, short_repr
from kvjax.generation.generator import run_generation
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import GenerateKeywords, GenerationOptions, explicit_signature
from kvjax.generation.request import (
    GenerationRequest,
    PromptChunk,
    Prompts,
    prepare_request,
    prompt_chunks,
)
from kvjax.generation.results import GenerationResult
from kvjax.operations.migration import delete_unshared, migrate, move_layers
from kvjax.placement.device import Device, check_placement


@dataclass(frozen=True)
class Batch:
    """The prompts of one batch, and the cache that they continue; None for a new cache.

    Example:
      ```python
      result = kvjax.generate(lm, "The json module", max_new_tokens=8)
      batch = kvjax.generation.Batch(result.pending_tokens, result.cache)
      (more,) = kvjax.generate_batches(lm, [batch], max_new_tokens=8)
      ```
    """

    prompts: Prompts
    cache: KVCache | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, KVCache | None):
            raise ValueError(f"the cache of a Batch must be a KVCache, got {self.cache!r}")


@explicit_signature(GenerateKeywords)
def generate_batches(
    lm: LanguageModel,
    batches: Iterable[Prompts | Batch],
    *,
    placement: Device | None = None,
    offload: Device | None = None,
    **settings: Unpack[GenerateKeywords],
) -> Iterator[GenerationResult]:
    """Continue one batch of prompts after another, each in the same way as ``generate``.

    While one batch decodes, a second thread prepares the next ``limits.prefetch_steps`` batches (1
    by default, 0 if there are several processes): it tokenizes and checks the prompts and starts
    the transfer of their tokens. With ``placement``, it also moves the first ``prefetch_steps``
    layers of the next batch's cache.

    Args:
      lm: a model from ``kvjax.models.load``.
      batches: prompts as for ``generate``, or a ``Batch`` with a cache to continue, which is
        donated. Batches are taken from the iterator ``prefetch_steps`` batches before they run. Set
        ``prefetch_steps`` to 0 if a batch continues the cache of the result just before it.
      placement: the placement to which given caches are moved before their batch runs. ``Device()``
        moves caches back that ``offload`` moved to the host. By default they are not moved.
      offload: the placement to which caches of results are moved. ``Host()`` frees device memory
        for the next batch. By default they are not moved.
      settings: other arguments of ``generate``, which apply to all batches.
        ``limits.prefetch_steps`` is how many batches are prepared in advance.

    Returns:
      An iterator over results, in order.

    Raises:
      ValueError: for the same reasons as ``generate``. It is raised during the iteration, when the
        batch would run, like errors of the iterable ``batches``. An invalid placement raises it
        immediately.
      TypeError: for a keyword that ``generate`` does not have.

    Example:
      ```python
      batches = [["The json module", "An iterator"], ["A list", "A tuple"]]
      for result in kvjax.generate_batches(lm, batches, max_new_tokens=8):
          print(result.text)
      ```
    """
    if isinstance(batches, str):
        raise ArgumentError(
            "batches is a string: give an iterable of batches, each a list of prompts",
            param="batches",
        )
    try:
        iterator = iter(batches)
    except TypeError:
        raise ArgumentError(
            f"batches must be an iterable of batches, got {short_repr(batches)}", param="batches"
        ) from None
    for place in (placement, offload):
        if place is not None:
            check_placement(place)
    options = GenerationOptions(**settings)
    lm = lm if options.mesh is None else lm.on(options.mesh)
    ahead = 1 if options.limits is None else options.limits.prefetch_steps
    if jax.process_count() > 1:
        ahead = 0  # the threads of different processes could run collectives in different orders
    return _Run(lm, options, placement, offload, ahead).results(iterator)


_Prepared = Future[tuple[GenerationRequest, list[PromptChunk] | None]]
"""A batch that the second thread is preparing."""


@dataclass(frozen=True)
class _Run:
    """The arguments that all batches share."""

    lm: LanguageModel
    options: GenerationOptions
    placement: Device | None
    offload: Device | None
    ahead: int

    def results(self, batches: Iterator[Prompts | Batch]) -> Iterator[GenerationResult]:
        # The second thread uses the caller's default device too.
        device = jax.default_device(jax.config.values["jax_default_device"])
        thread = ThreadPoolExecutor(1, "kvjax-batches", initializer=device.__enter__)
        prepared, queue = self._prepare_all(batches, thread), deque[_Prepared]()
        next_cache: Future[KVCache | None] | None = None
        try:
            while True:
                queue.extend(itertools.islice(prepared, self.ahead + 1 - len(queue)))
                if not queue:
                    return
                batch, cache, next_cache = queue.popleft(), next_cache, None
                if queue and self.placement is not None:
                    next_cache = thread.submit(self._move_first_layers, queue[0], self.placement)
                yield self._result(batch, cache)
        finally:
            thread.shutdown(wait=True, cancel_futures=True)

    def _prepare_all(
        self, batches: Iterator[Prompts | Batch], thread: ThreadPoolExecutor
    ) -> Iterator[_Prepared]:
        """Take batches from the iterator and prepare them. Errors become failed futures, so that
        they are raised when the batch would run."""
        used: dict[int, KVCache] = {}  # keeps the caches alive, so that their ids stay unique
        try:
            for batch in batches:
                batch = batch if isinstance(batch, Batch) else Batch(batch)
                cache = self.options.cache if batch.cache is None else batch.cache
                # Check this here. The second thread would read the cache while the running batch
                # donates it.
                if id(cache) in used:
                    yield _failed(ValueError(DONATED))
                    continue
                if isinstance(cache, KVCache):
                    used[id(cache)] = cache
                options = replace(self.options, cache=cache)
                yield thread.submit(self._prepare, batch.prompts, options)
        except Exception as error:
            yield _failed(error)

    def _prepare(
        self, prompts: Prompts, options: GenerationOptions
    ) -> tuple[GenerationRequest, list[PromptChunk] | None]:
        request = prepare_request(self.lm, prompts, options)
        # With a prefix tree, the number of cached tokens is known only when the batch runs.
        return request, None if request.prefix_cache else prompt_chunks(request)

    def _move_first_layers(self, prepared: _Prepared, placement: Device) -> KVCache | None:
        """Move the first layers of a batch's cache. The given cache keeps its own arrays, so it
        stays valid if the batch never runs."""
        cache = prepared.result()[0].cache
        if cache is None:
            return None
        check_not_donated(cache)
        return move_layers(cache, placement, range(min(self.ahead, len(cache.layers))), keep=True)

    @without_mesh_context
    def _result(
        self, prepared: _Prepared, moved: Future[KVCache | None] | None
    ) -> GenerationResult:
        request, chunks = prepared.result()
        cache = request.cache
        if cache is not None:
            check_not_donated(cache)
            partly_moved = None if moved is None else moved.result()
            if partly_moved is not None:
                for old, new in zip(cache.layers, partly_moved.layers, strict=True):
                    delete_unshared(old, new)
                cache = partly_moved
            cache = cache if self.placement is None else migrate(cache, self.placement)
            request = replace(request, cache=cache)
        result = run_generation(self.lm, request, chunks=chunks)
        if self.offload is None or result.cache is None:
            return result
        cache = migrate(result.cache, self.offload)
        return replace(result, cache=cache, stats=replace(result.stats, cache_bytes=nbytes(cache)))


def _failed(error: Exception) -> _Prepared:
    future: _Prepared = Future()
    future.set_exception(error)
    return future
