"""Compiling before the first request: what ``kvjax.generate`` will run, without running it."""

import time
from dataclasses import dataclass, replace
from typing import Unpack

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.checks import whole_number
from kvjax.core.context import outside
from kvjax.generation import programs
from kvjax.generation.model import LanguageModel
from kvjax.generation.prompts import prompt_chunks
from kvjax.generation.request import Request, capacity_bucket, prepare
from kvjax.generation.session import Session
from kvjax.generation.settings import Compiling, Options, spelled_out
from kvjax.generation.statistics import Meter
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


@spelled_out(Compiling)
@outside
def compile(
    lm: LanguageModel,
    policy: PolicyChoice = "static",
    *,
    max_len: int,
    batch: int = 1,
    **settings: Unpack[Compiling],
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
      policy, max_len, batch: of the cache, tokens a row that it can hold, and rows. A text without
        ``max_len`` has the programs of the capacity that ``generate`` rounds up to, where the
        policy is ``"static"``.
      temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens: as they will be given to
        ``generate``. Which of them are given chooses programs, and whether ``temperature`` is 0;
        other values compile nothing.
      eos_token_ids, prefill_chunk: as for ``generate``; more than 7 tokens choose a program.

    Raises:
      ValueError: as of ``generate``; if ``policy`` is a cache.
    """
    if isinstance(policy, KVCache):
        raise ValueError("compile takes a policy, not a cache: give the one that it follows")
    batch = whole_number("batch", batch, 1)
    options = Options(cache=policy, max_len=max_len, max_new_tokens=1, **settings)
    least = min(whole_number("min_new_tokens", options.min_new_tokens, 0), 1)
    options = replace(options, min_new_tokens=least)
    start, meter = time.perf_counter(), Meter()
    with meter.running():
        ready = _Ready(lm, batch, options)
        for least, most in ready.capacities:
            ready.at(least, most)
    return Compiled(
        time.perf_counter() - start, ready.programs, meter.compilations,
        max(ready.temporaries, default=None),
    )  # fmt: skip


class _Ready:
    """The programs of a generation, made ready one capacity after the other."""

    def __init__(self, lm: LanguageModel, batch: int, options: Options) -> None:
        self._lm, self._batch, self._options = lm, batch, options
        self._request = request = self._asked(1)
        self._session = Session(lm, request)
        self._session.start()
        cache = self._session.cache
        assert cache is not None
        # The fewest and the most tokens a row that meet each capacity of the cache.
        most = request.capacity if cache.grows_to is None else cache.max_len
        self.capacities = [(1, most)]
        while most < request.capacity:
            least, most = most + 1, min(capacity_bucket(most + 1), request.capacity)
            self.capacities.append((least, most))
        # Nothing is fed: tokens are chosen from logits of 0.
        jax.block_until_ready(self._session.begin())
        self.programs = 1
        self.temporaries: list[int] = []

    def at(self, least: int, most: int) -> None:
        """Make the programs ready that a cache has at one of its capacities."""
        session, chunk, max_len = self._session, self._request.chunk, self._request.capacity
        session.start()
        further = max(chunk, programs.CHUNK + 1)  # tokens that a dispatch may add
        for _, before in self.capacities:
            if before < least <= before + further:
                session.start()
                session.make_room(before)
                session.make_room(most)
        # As many lengths as have all widths that end in this capacity.
        widths = {}
        for held in range(least, min(least + chunk, most + 1, max_len)):
            rest = held - (held - 1) // chunk * chunk
            widths.setdefault(self._request.width(rest), rest)
        chunks = [prompt_chunks(self._asked(rest))[0] for rest in widths.values()]
        for lowered in session.lowered(chunks):
            found = lowered.compile().memory_analysis()
            self.programs += 1
            if found is not None:
                self.temporaries.append(int(found.temp_size_in_bytes))
        # What stands around the programs: a stop string that is taken back.
        session.take_back(np.zeros(len(self._request.prompts), np.int32))
        session.check()

    def _asked(self, tokens: int) -> Request:
        """A request of so many tokens a row."""
        return prepare(self._lm, [[0] * tokens] * self._batch, self._options)
