"""A generation as it runs: chunked prefill, dispatches of the decode loop, text as it comes."""

import functools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.cache.status import check
from kvjax.core.context import outside
from kvjax.core.device import fetch
from kvjax.core.errors import NonFiniteError
from kvjax.generation import programs
from kvjax.generation.model import LanguageModel
from kvjax.generation.prompts import Chunk, prompt_chunks
from kvjax.generation.request import Request, capacity_bucket
from kvjax.generation.statistics import GenerationStats, Meter
from kvjax.generation.text import RowText
from kvjax.operations.rewinding import rewind
from kvjax.operations.room import Move, make_room, settled
from kvjax.placement.device import Device

_WATCHED_STEPS = 32
"""The most steps of a dispatch where somebody waits for its text."""
_TOGETHER_STEPS = 8
"""The same, where many processes run together."""
_PROMPT_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""A streamed dispatch that takes less grows, one that takes more shrinks."""


@dataclass(frozen=True)
class GenerationResult:
    """What ``generate`` gives.

    ``text``: the new text of each row, without special tokens and without the prompt; None where
    the model has no tokenizer.
    ``tokens``: the new tokens of each row, the end-of-text token included.
    ``stats``: what it cost, and why each row ended.
    ``cache``: the prompts and the tokens that were fed, to continue from; None without a cache.
    A row with a stop string that is longer than its ring's slack may be left behind it:
    ``kvjax.check`` says so, and ``kvjax.select`` has the other rows.
    ``unfed``: tokens of each row that belong to it, but are not in the cache yet: the newest one,
    or none where a stop string took back later ones. A continuation's prompts begin with them.

    A row that met a stop string has the text before it, and the longest run of tokens whose text
    does not reach into it. Where a stop string begins inside a token, ``text`` has the first
    characters of that token, and ``tokens`` and ``cache`` end before it.
    """

    # The annotations leave None out: who has a tokenizer and a cache need not assert it.
    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    cache: KVCache
    unfed: list[list[int]]


@dataclass(frozen=True)
class Piece:
    """What one step of a ``stream`` adds: the new text (None without a tokenizer) and tokens of
    each row, empty where there are none, and the figures so far."""

    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats


_Report = tuple[jax.Array, programs.Progress]
"""Of a dispatch: the tokens it chose, int32[batch, chunk], and where the rows stand after it."""


class Stream(Iterator[Piece]):
    """A generation that runs as it is iterated over: see ``stream``."""

    def __init__(
        self,
        lm: LanguageModel,
        request: Request,
        *,
        watched: bool,
        chunks: list[Chunk] | None = None,
    ) -> None:
        self._lm, self._request = lm, request
        self._chunks = chunks
        self._rows = [RowText(lm.tokenizer, ids, request.stops) for ids in request.prompts]
        for row in self._rows[request.rows :]:
            row.finish("padding")
        self._counts = np.zeros(len(self._rows), np.int32)
        # Processes that run together do the same steps, whatever time each takes.
        alone = jax.process_count() == 1
        first = 1 if alone else _TOGETHER_STEPS
        self._steps = first if watched else _WATCHED_STEPS if request.stops else programs.CHUNK
        self._paced = watched and alone
        self._prefill_meter, self._decode_meter = Meter(), Meter()
        self._cache_bytes: dict[str, int] = {}
        self._moves: list[Move] = []
        self._result: GenerationResult | None = None
        self._pieces = self._run()

    @outside
    def __next__(self) -> Piece:
        return next(self._pieces)

    @property
    def result(self) -> GenerationResult:
        """The whole result.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            raise RuntimeError("the result is there after the last piece: iterate to the end")
        return self._result

    def _run(self) -> Iterator[Piece]:
        with self._prefill_meter.running():
            self._prefill()
            self._absorb((self._progress.token[:, None], self._progress))
        dispatched = 1
        longest = int((self._request.start + [len(row) for row in self._request.prompts]).max())
        flying: deque[_Report] = deque()
        # One dispatch ahead, the device works while the host decodes text. Its loop ends at once
        # if all rows are done by then; but only the host sees stop strings.
        ahead = 1 if self._request.stops else 2
        while any(row.reason is None for row in self._rows):
            yield self._piece()
            before = self._decode_meter.seconds
            with self._decode_meter.running():
                while len(flying) < ahead and dispatched < self._request.limit:
                    steps = min(self._steps, self._request.limit - dispatched, self._revocable())
                    self._context = self._fitting(self._context, longest + dispatched + steps)
                    steps = min(steps, self._revocable())  # a layer with a tail forgets less
                    dispatched += steps
                    flying.append(self._decode(steps))
                self._absorb(flying.popleft())
            if self._paced:
                self._pace(self._decode_meter.seconds - before)
        with self._decode_meter.running():
            cache, unfed = self._settle()
        asked = self._rows[: self._request.rows]
        texts = self._texts([row.text for row in asked])
        tokens = [row.tokens for row in asked]
        self._result = GenerationResult(texts, tokens, self._stats(), cache, unfed[: len(asked)])
        yield self._piece()

    def _prefill(self) -> None:
        """Feed the prompts, and choose each row's first token."""
        lm, request = self._lm, self._request
        batch, vocab = len(request.prompts), lm.config.vocab_size
        context = self._empty_context()
        put = functools.partial(request.put, beside=context)
        logits = put(np.zeros((batch, vocab), np.float32))
        self._settings = put(request.settings)
        self._limit = put(np.int32(request.limit))
        for chunk in prompt_chunks(request) if self._chunks is None else self._chunks:
            context = self._fitting(context, chunk.held)
            context, logits = programs.prefill(
                lm.architecture, lm.params, context, logits, chunk.tokens, chunk.lengths, chunk.ends
            )
        seen = None
        if request.filters.repetition_penalty:
            mask = np.zeros((batch, vocab), bool)
            for row, ids in enumerate(request.prompts):
                mask[row, ids] = True
            seen = put(mask)
        self._context = context
        self._progress, self._seen = programs.begin(
            logits, request.filters, self._settings, self._limit, seen
        )

    def _empty_context(self) -> programs.Context:
        """What the prompts are appended to."""
        request = self._request
        batch = len(request.prompts)
        if request.cache is not None:
            cache, moves = settled(request.cache, self._capacity_of(request.cache, request.need))
            self._moves += moves
        elif request.policy is not None:
            cache = allocate(
                self._lm.config, request.policy, batch=batch, max_len=request.max_len,
                room=request.capacity, mesh=None if request.spread is None else self._lm.mesh,
            )  # fmt: skip
            holds = cache.max_len if cache.grows_to is None else cache.grows_to
            if request.need > holds:
                raise ValueError(
                    f"prompt and max_new_tokens make {request.need} tokens, but the policy's cache "
                    f"holds {holds}"
                )
        else:
            text = np.zeros((batch, request.capacity), np.int32)
            place = Device(spread=request.spread)
            rows: Any = place.put((text, np.zeros(batch, np.int32)))
            return programs.Uncached(*rows)
        self._cache_bytes = nbytes(cache)
        return programs.Cached(cache)

    def _revocable(self) -> int:
        """Steps after which a stop string can still be taken back from a ring or a tail."""
        cache = self._context.cache
        if not self._request.stops or cache is None or cache.revocable is None:
            return programs.CHUNK
        return max(1, cache.revocable + 1 - max(row.pending for row in self._rows))

    def _fitting(self, context: programs.Context, tokens: int) -> programs.Context:
        """The context with room for so many tokens a row, where its cache grows."""
        cache = context.cache
        if cache is None or cache.grows_to is None or tokens <= cache.max_len:
            return context
        cache, moves = make_room(cache, self._capacity_of(cache, tokens))
        self._moves += moves
        self._cache_bytes = nbytes(cache)
        return programs.Cached(cache)

    @staticmethod
    def _capacity_of(cache: KVCache, tokens: int) -> int:
        """What a cache is grown to for so many tokens a row."""
        most = cache.max_len if cache.grows_to is None else cache.grows_to
        return min(capacity_bucket(tokens), most)

    def _decode(self, steps: int) -> _Report:
        """Dispatch so many steps, without waiting for them."""
        halt = np.array([row.reason is not None for row in self._rows])
        self._context, self._progress, self._seen, out = programs.decode(
            self._lm.architecture,
            self._request.filters,
            self._lm.params,
            self._context,
            self._progress,
            self._seen,
            halt,
            self._settings,
            self._limit,
            np.int32(steps),
        )
        return out, self._progress

    def _absorb(self, report: _Report) -> None:
        """Wait for a dispatch, and take its tokens in.

        Raises:
          NonFiniteError: if a row's logits were not finite numbers.
        """
        out, progress = fetch(report)
        if progress.broken.any():
            rows = ", ".join(str(row) for row in np.flatnonzero(progress.broken))
            raise NonFiniteError(
                f"the logits of row(s) {rows} are not finite numbers, after "
                f"{int(progress.count[progress.broken][0])} new tokens; nothing was drawn from them"
            )
        for i, row in enumerate(self._rows):
            for token in out[i, : progress.count[i] - self._counts[i]].tolist():
                row.push(token)
            if progress.done[i] and row.reason is None:
                row.finish("eos" if row.tokens[-1] in self._request.eos else "length")
        self._counts = progress.count

    def _settle(self) -> tuple[Any, list[list[int]]]:
        """The cache as the texts have it, and each row's tokens that it lacks."""
        kept = np.array([len(row.tokens) for row in self._rows], np.int32)
        unfed = [
            row.tokens[-1:] if whole else []
            for row, whole in zip(self._rows, kept == self._counts, strict=True)
        ]
        cache = self._context.cache
        if cache is None:
            return None, unfed
        check(cache)
        surplus = np.maximum(self._counts - 1 - kept, 0)
        return rewind(cache, surplus) if surplus.any() else cache, unfed

    def _piece(self) -> Piece:
        taken = [row.take() for row in self._rows[: self._request.rows]]
        text = self._texts([text for text, _ in taken])
        return Piece(text, [tokens for _, tokens in taken], self._stats())

    def _texts(self, texts: list[str]) -> Any:
        return None if self._lm.tokenizer is None else texts

    def _stats(self) -> GenerationStats:
        prefill, decode = self._prefill_meter, self._decode_meter
        rows = self._request.rows
        decoded = int(self._counts[:rows].sum()) - rows
        return GenerationStats(
            prompt_tokens=sum(map(len, self._request.prompts)),
            new_tokens=sum(len(row.tokens) for row in self._rows),
            compile_seconds=prefill.compile_seconds + decode.compile_seconds,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode.seconds,
            decode_tokens_per_second=decoded / decode.seconds if decoded > 0 else 0.0,
            cache_bytes=self._cache_bytes,
            compilations=prefill.compilations + decode.compilations,
            stop_reasons=tuple(row.reason for row in self._rows[:rows]),
            moves=tuple(self._moves),
        )

    def _pace(self, seconds: float) -> None:
        """Choose how many steps the next dispatch of a stream has, by how long this one took."""
        if seconds < _PROMPT_SECONDS:
            self._steps = min(2 * self._steps, _WATCHED_STEPS)
        elif seconds > _SLOW_SECONDS:
            self._steps = max(self._steps // 2, 1)
