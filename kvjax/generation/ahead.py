"""Compiling before the first request: what ``kvjax.generate`` will run, without running it."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.cache.status import check
from kvjax.core.checks import whole_number
from kvjax.core.context import outside
from kvjax.generation import programs
from kvjax.generation.model import LanguageModel
from kvjax.generation.prompts import prompt_chunks
from kvjax.generation.request import Options, Request, capacity_bucket, prepare
from kvjax.generation.session import Stream
from kvjax.generation.statistics import Meter
from kvjax.operations.rewinding import rewind
from kvjax.policies.presets import PolicyChoice


@dataclass(frozen=True)
class Compiled:
    """What ``compile`` has made ready.

    ``seconds``: what it took. ``programs``: of the generation, ready now: prefill for every width
    of a chunk, the first token, and the decode loop, at every capacity. ``compilations``: how many
    were compiled, or fetched from the persistent compilation cache, for it, small ones around them
    counted; 0 if all were there. ``temporaries``: bytes that the largest of them needs beside
    weights and cache, None where the compiler does not say.
    """

    seconds: float
    programs: int
    compilations: int
    temporaries: int | None


@outside
def compile(
    lm: LanguageModel,
    policy: PolicyChoice = "static",
    *,
    max_len: int,
    batch: int = 1,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    min_new_tokens: int = 0,
    eos_token_ids: int | Sequence[int] | None = None,
    prefill_chunk: int = 512,
) -> Compiled:
    """Compile what ``generate(lm, prompts, cache=policy, max_len=max_len, ...)`` will run, so that
    in this process it compiles nothing, for any prompts and any number of new tokens.

    It costs the compilations, one after the other, and the memory of a cache while they last, which
    is allocated and freed: of one that grows twice, grown to every capacity that a text may meet
    on its way. The model is not run; the sampler is, once, on logits of 0. Programs are kept where
    ``jax.jit`` finds them again, so ``jax.clear_caches`` forgets them; with JAX's persistent
    compilation cache the next process reads instead of compiling. A cache that keeps to a memory
    (``policy("auto")``) may move its layers on ways that are not gone here, and then compiles.

    Args:
      lm: the model.
      policy: of the cache.
      max_len: tokens a row of the cache can hold. A text without it has the programs of the
        capacity that ``generate`` rounds up to, where the policy is ``"static"``.
      batch: prompts of a call.
      temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens: as they will be given to
        ``generate``. Which of them are given chooses programs, and whether ``temperature`` is 0;
        other values compile nothing.
      eos_token_ids: by default the checkpoint's; more than 7 of them choose a program.
      prefill_chunk: as it will be given to ``generate``.

    Returns:
      How many programs are ready, and what it took.

    Raises:
      ValueError: as of ``generate``; if ``policy`` is a cache.
    """
    if isinstance(policy, KVCache):
        raise ValueError("compile takes a policy, not a cache: give the one that it follows")
    batch = whole_number("batch", batch, 1)
    options = Options(
        1, policy, max_len, 0, temperature, top_k, top_p, min_p, repetition_penalty,
        min(whole_number("min_new_tokens", min_new_tokens, 0), 1), None, eos_token_ids, True,
        prefill_chunk, None,
    )  # fmt: skip
    start, meter = time.perf_counter(), Meter()
    with meter.running():
        ready = _Ready(lm, batch, options)
        for capacity in ready.capacities():
            ready.at(capacity)
    return Compiled(
        time.perf_counter() - start, ready.programs, meter.compilations,
        max(ready.temporaries, default=None),
    )  # fmt: skip


class _Ready:
    """The programs of a generation, made ready one capacity after the other."""

    def __init__(self, lm: LanguageModel, batch: int, options: Options) -> None:
        self._lm, self._batch, self._options = lm, batch, options
        request = self._asked(1)
        # Without chunks it makes the cache and chooses first tokens, and feeds nothing.
        self._stream = Stream(lm, request, watched=False, chunks=[])
        self._stream._prefill()
        self._rows = len(request.prompts)  # on a mesh perhaps more
        self._logits = request.put(
            np.zeros((self._rows, lm.config.vocab_size), np.float32), self._stream._context
        )
        self._chunk, self._max_len = request.chunk, request.capacity
        self.programs = 1
        self.temporaries: list[int] = []

    def capacities(self) -> Iterator[tuple[int, int]]:
        """The fewest and the most tokens a row that meet each capacity of the cache."""
        cache: Any = self._stream._context.cache
        least, most = 1, self._max_len if cache.grows_to is None else cache.max_len
        yield least, most
        while most < self._max_len:
            least, most = most + 1, min(capacity_bucket(most + 1), self._max_len)
            yield least, most

    def at(self, tokens: tuple[int, int]) -> None:
        """Make the programs ready that a cache has at one of its capacities."""
        least, most = tokens
        stream, lm = self._stream, self._lm
        context: Any = stream._context
        further = max(self._chunk, programs.CHUNK + 1)  # tokens that a dispatch may add
        for _, before in self.capacities():
            if before < least <= before + further:
                context = stream._fitting(stream._fitting(stream._empty_context(), before), most)
        # As many lengths as have all widths that end in this capacity.
        widths = {}
        for held in range(least, min(least + self._chunk, most + 1, self._max_len)):
            rest = held - (held - 1) // self._chunk * self._chunk
            widths.setdefault(stream._request.width(rest), rest)
        for rest in widths.values():
            chunk = prompt_chunks(self._asked(rest))[0]
            self._keep(
                programs.prefill.lower(
                    lm.architecture, lm.params, context, self._logits, chunk.tokens, chunk.lengths,
                    chunk.ends,
                )
            )  # fmt: skip
        self._keep(
            programs.decode.lower(
                lm.architecture, stream._request.filters, lm.params, context, stream._progress,
                stream._seen, np.zeros(self._rows, bool), stream._settings, stream._limit,
                np.int32(0),
            )
        )  # fmt: skip
        # What stands around the programs: first tokens as those of a dispatch, and a stop string
        # that is taken back.
        jax.block_until_ready(stream._progress.token[:, None])
        check(rewind(context.cache, np.zeros(self._rows, np.int32)))

    def _asked(self, tokens: int) -> Request:
        """A request of so many tokens a row."""
        return prepare(self._lm, [[0] * tokens] * self._batch, self._options)

    def _keep(self, lowered: Any) -> None:
        # A call with arguments of the same kind finds what was compiled for them here.
        found = lowered.compile().memory_analysis()
        self.programs += 1
        if found is not None:
            self.temporaries.append(int(found.temp_size_in_bytes))
