"""Generation over a stream of batches: the next one is got ready while the present one runs."""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax

from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.validation import DONATED, check_not_donated, short_repr
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
    """Prompts of one batch, and the cache that they go on from, or None for a new one."""

    prompts: Prompts
    cache: KVCache | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cache, KVCache | None):
            raise ValueError(f"the cache of a Batch is a KVCache to go on from, got {self.cache!r}")


@explicit_signature(GenerateKeywords)
def generate_batches(
    lm: LanguageModel,
    batches: Iterable[Prompts | Batch],
    *,
    placement: Device | None = None,
    park: Device | None = None,
    **settings: Unpack[GenerateKeywords],
) -> Iterator[GenerationResult]:
    """Continue batch after batch of prompts, each as ``generate`` does.

    While one decodes, a second thread gets the next ``limits.prefetch_steps`` batches ready (1 by
    default; 0 where there are many processes): their texts are encoded and checked, their tokens
    are on their way to the device, and of the very next one's cache the first ``prefetch_steps``
    layers, where ``placement`` asks for them to be moved.

    Args:
      lm: a model from ``kvjax.models.load``.
      batches: prompts as of ``generate``, or a ``Batch`` with a cache to go on from, which is used
        up. So many are taken from the iterator before they run: one that goes on from an earlier
        result must come that much later, or ``prefetch_steps`` be 0.
      placement: where caches that are given are to be while their batch runs: ``Device()`` takes up
        those that were parked on the host. By default they stay where they are.
      park: where the caches of results are moved to: ``Host()`` makes room for the next batch. By
        default they stay where they are.
      settings: the other arguments of ``generate``, the same for all batches; of ``limits`` the
        ``prefetch_steps`` as well.

    Returns:
      An iterator over results, in order.

    Raises:
      ValueError: as of ``generate``, and whatever ``batches`` raises: from the iteration, when the
        turn of that batch comes. A placement that is none, at once.
      TypeError: if ``generate`` does not know a setting.
    """
    if isinstance(batches, str):
        raise ValueError("batches is a text: give an iterable of batches, each a list of prompts")
    try:
        coming = iter(batches)
    except TypeError:
        raise ValueError(
            f"batches must be an iterable of batches, got {short_repr(batches)}"
        ) from None
    for place in (placement, park):
        if place is not None:
            check_placement(place)
    options = GenerationOptions(**settings)
    lm = lm if options.mesh is None else lm.on(options.mesh)
    ahead = 1 if options.limits is None else options.limits.prefetch_steps
    if jax.process_count() > 1:
        ahead = 0  # two threads would meet the other processes' in any order
    return _Run(lm, options, placement, park, ahead).results(coming)


_Ready = Future[tuple[GenerationRequest, list[PromptChunk] | None]]
"""A batch that is got ready in the second thread."""


@dataclass(frozen=True)
class _Run:
    """What stays the same from batch to batch."""

    lm: LanguageModel
    options: GenerationOptions
    placement: Device | None
    park: Device | None
    ahead: int

    def results(self, batches: Iterator[Prompts | Batch]) -> Iterator[GenerationResult]:
        # The caller's default device is the second thread's too.
        device = jax.default_device(jax.config.values["jax_default_device"])
        second = ThreadPoolExecutor(1, "kvjax-batches", initializer=device.__enter__)
        coming, waiting = self._coming(batches, second), deque[_Ready]()
        following: Future[KVCache | None] | None = None
        try:
            while True:
                waiting.extend(itertools.islice(coming, self.ahead + 1 - len(waiting)))
                if not waiting:
                    return
                present, begun, following = waiting.popleft(), following, None
                if waiting and self.placement is not None:
                    following = second.submit(self._first_layers, waiting[0], self.placement)
                yield self._result(present, begun)
        finally:
            second.shutdown(wait=True, cancel_futures=True)

    def _coming(
        self, batches: Iterator[Prompts | Batch], second: ThreadPoolExecutor
    ) -> Iterator[_Ready]:
        """The batches, as they are asked for; what is wrong is told when their turn comes."""
        taken: dict[int, KVCache] = {}  # held, or another could come to have the same id
        try:
            for batch in batches:
                batch = batch if isinstance(batch, Batch) else Batch(batch)
                given = self.options.cache if batch.cache is None else batch.cache
                # Told here: the second thread would look at it while it is being used up.
                if id(given) in taken:
                    yield _failed(ValueError(DONATED))
                    continue
                if isinstance(given, KVCache):
                    taken[id(given)] = given
                options = replace(self.options, cache=given)
                yield second.submit(self._prepared, batch.prompts, options)
        except Exception as error:
            yield _failed(error)

    def _prepared(
        self, prompts: Prompts, options: GenerationOptions
    ) -> tuple[GenerationRequest, list[PromptChunk] | None]:
        request = prepare_request(self.lm, prompts, options)
        # What a tree knows of them shows when their turn comes.
        return request, None if request.prefix_cache else prompt_chunks(request)

    def _first_layers(self, ready: _Ready, placement: Device) -> KVCache | None:
        """The cache with as many layers moved as are got ready ahead, which are held twice until
        its turn: if that never comes, the cache given is still whole."""
        cache = ready.result()[0].cache
        if cache is None:
            return None
        check_not_donated(cache)
        return move_layers(cache, placement, range(min(self.ahead, len(cache.layers))), keep=True)

    @without_mesh_context
    def _result(self, ready: _Ready, begun: Future[KVCache | None] | None) -> GenerationResult:
        request, chunks = ready.result()
        given = request.cache
        if given is not None:
            check_not_donated(given)
            first = None if begun is None else begun.result()
            if first is not None:
                for old, new in zip(given.layers, first.layers, strict=True):
                    delete_unshared(old, new)
                given = first
            given = given if self.placement is None else migrate(given, self.placement)
            request = replace(request, cache=given)
        result = run_generation(self.lm, request, chunks=chunks)
        if self.park is None or result.cache is None:
            return result
        cache = migrate(result.cache, self.park)
        return replace(result, cache=cache, stats=replace(result.stats, cache_bytes=nbytes(cache)))


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
