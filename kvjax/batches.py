"""Generation over a stream of batches: the next one is got ready while the present one runs."""

import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from kvjax._chunks import Chunk, prompt_chunks
from kvjax._model import LanguageModel
from kvjax._request import Options, Prompts, Request, prepare
from kvjax._stream import GenerationResult, Stream
from kvjax.cache import KVCache
from kvjax.generate import generate
from kvjax.limits import InferenceLimits
from kvjax.migrate import migrate
from kvjax.placement import Device


@dataclass(frozen=True)
class Batch:
    """Prompts of one batch, and the cache that they go on from, or None for a new one."""

    prompts: Prompts
    cache: KVCache | None = None


def generate_batches(
    lm: LanguageModel,
    batches: Iterable[Prompts | Batch],
    *,
    placement: Device | None = None,
    park: Device | None = None,
    limits: InferenceLimits | None = None,
    **settings: Any,
) -> Iterator[GenerationResult]:
    """Continue batch after batch of prompts, each as ``generate`` does.

    While one decodes, a second thread gets the next ``limits.prefetch_steps`` batches ready (1 by
    default): their texts are encoded and checked, their tokens are on their way to the device, and
    of the very next one's cache the first ``prefetch_steps`` layers, where ``placement`` asks for
    them to be moved.

    Args:
      lm: a model from ``kvjax.models.load``.
      batches: prompts as of ``generate``, or a ``Batch`` with a cache to go on from, which is used
        up. So many are taken from the iterator before they run: one that goes on from an earlier
        result must come that much later, or ``prefetch_steps`` be 0.
      placement: where caches that are given are to be while their batch runs: ``Device()`` takes up
        those that were parked on the host. By default they stay where they are.
      park: where the caches of results are moved to: ``Host()`` makes room for the next batch. By
        default they stay where they are.
      limits: as of ``generate``, and ``prefetch_steps``.
      settings: the other arguments of ``generate``, the same for all batches.

    Returns:
      An iterator over results, in order.

    Raises:
      ValueError: as of ``generate``: from the iteration, when the turn of a wrong batch comes.
      TypeError: if ``generate`` does not know a setting.
    """
    if isinstance(batches, str):
        raise ValueError("batches is a text: give an iterable of batches, each a list of prompts")
    found = inspect.signature(generate).bind(lm, None, limits=limits, **settings)
    found.apply_defaults()
    options = Options(**{k: v for k, v in found.arguments.items() if k not in ("lm", "prompts")})
    ahead = 1 if limits is None else limits.prefetch_steps
    return _run(lm, iter(batches), options, placement, park, ahead)


@dataclass
class _Waiting:
    """A batch that is got ready: by ``ready``, and later ``approach``, in the second thread."""

    ready: Future[tuple[Request, list[Chunk]]]
    approach: Future[KVCache | None] | None = None


def _run(
    lm: LanguageModel,
    batches: Iterator[Prompts | Batch],
    options: Options,
    placement: Device | None,
    park: Device | None,
    ahead: int,
) -> Iterator[GenerationResult]:
    waiting: deque[_Waiting] = deque()
    pool = ThreadPoolExecutor(1, "kvjax-batches")
    try:
        while True:
            while len(waiting) <= ahead:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                waiting.append(_Waiting(pool.submit(_ready, lm, batch, options)))
            if not waiting:
                return
            present = waiting.popleft()
            if waiting and placement is not None:
                following = waiting[0]
                following.approach = pool.submit(_first_layers, following.ready, placement, ahead)
            yield _result(lm, present, placement, park)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _ready(
    lm: LanguageModel, batch: Prompts | Batch, options: Options
) -> tuple[Request, list[Chunk]]:
    given = batch if isinstance(batch, Batch) else Batch(batch)
    if given.cache is not None:
        options = replace(options, cache=given.cache)
    request = prepare(lm, given.prompts, options)
    return request, prompt_chunks(request)


def _first_layers(
    ready: Future[tuple[Request, list[Chunk]]], placement: Device, count: int
) -> KVCache | None:
    cache = ready.result()[0].cache
    if cache is None:
        return None
    layers = len(cache.layers if cache.sources is None else cache.sources)
    return migrate(cache, placement, range(min(count, layers)))


def _result(
    lm: LanguageModel, present: _Waiting, placement: Device | None, park: Device | None
) -> GenerationResult:
    request, chunks = present.ready.result()
    if request.cache is not None and placement is not None:
        begun = None if present.approach is None else present.approach.result()
        cache = migrate(request.cache if begun is None else begun, placement)
        request = replace(request, cache=cache)
    running = Stream(lm, request, watched=False, chunks=chunks)
    for _ in running:
        pass
    result = running.result
    if park is None or result.cache is None:
        return result
    return replace(result, cache=migrate(result.cache, park))
