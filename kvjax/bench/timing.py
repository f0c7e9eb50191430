"""A policy's caches behind one prompt, and what ``kvjax.bench`` times on them."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.cache.status import check
from kvjax.core.typing import Array
from kvjax.generation import programs
from kvjax.generation.model import LanguageModel, Model
from kvjax.generation.prompts import prompt_chunks
from kvjax.generation.request import Options, prepare
from kvjax.generation.statistics import Meter
from kvjax.layouts import UNLIMITED
from kvjax.operations.rewinding import rewind
from kvjax.operations.room import make_room
from kvjax.operations.rows import reset
from kvjax.policies.presets import PolicyChoice

KINDS = ("whole", "logits", "first", "single")
"""Runs of steps: the decode loop, the same without a sampler, that behind a single token, and the
decode loop a step a dispatch."""


class Timed:
    """Two caches of a policy, one with the prompt and one with a token, and times of runs on them.

    ``seconds``: of a step, by kind, and of the whole prompt as ``"prefill"``: a number a repeat.
    ``allocated``: bytes of one of the caches, by place.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: PolicyChoice,
        prompt: np.ndarray,
        steps: int,
        sampling: dict[str, Any],
    ) -> None:
        options = Options(
            max_new_tokens=steps, cache=policy, max_len=None, seed=0, **sampling,
            repetition_penalty=None, min_new_tokens=0, stop=None, eos_token_ids=(),
            use_cache=True, prefill_chunk=512, limits=None,
        )  # fmt: skip
        self._lm, self.steps = lm, steps
        self.meter = Meter()
        self.seconds: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "prefill")}
        self.request = prepare(lm, prompt.tolist(), options)
        if self.request.spread is not None:
            self.request.spread.check_rows(len(prompt))
        with self.meter.running():
            self.full, self._nearly_empty = self._made(), self._made()
            self.allocated = nbytes(self.full)
            self._chunks = prompt_chunks(self.request)
            rows = len(prompt)
            vocab = lm.config.vocab_size
            self._put = functools.partial(self.request.put, beside=self.full)
            # The loops' arguments, there once: a step a dispatch is not to wait for them.
            self._settings = self._put(self.request.settings)
            self._limit, self._one = self._put((np.int32(UNLIMITED), np.int32(1)))
            self._blank = np.zeros((rows, vocab), np.float32)
            self._halt = self._put(np.zeros(rows, bool))
            self._tokens, self._counts = self._put((prompt[:, 0], np.ones(rows, np.int32)))

    def run(self, *, counted: bool, prefill: bool) -> None:
        """One round of everything; the first one compiles, fills the caches and is not counted.

        Raises:
          NonFiniteError: if the model gives logits that are not finite.
        """
        found = {}
        with contextlib.nullcontext() if counted else self.meter.running():
            if prefill or not counted:
                found["prefill"] = self._fill()
            if not counted:
                context, _ = self._bare(programs.Cached(self._nearly_empty), self._one)
                self._nearly_empty = context.cache
            steps = self._put(np.int32(self.steps))
            found["whole"], self.full = self._back(self._whole, self.full, steps)
            found["logits"], self.full = self._back(self._bare, self.full, steps)
            found["first"], self._nearly_empty = self._back(self._bare, self._nearly_empty, steps)
            found["single"], self.full = self._back(self._dispatches, self.full, steps)
        if counted:
            for kind, seconds in found.items():
                self.seconds[kind].append(seconds)

    def drop(self) -> None:
        """Free the caches, and what else is on the device."""
        del self.full, self._nearly_empty, self._chunks, self._progress

    def _made(self) -> KVCache:
        request = self.request
        cache = init_cache(
            self._lm.config,
            request.policy,
            batch=len(request.prompts),
            max_len=request.capacity,
            mesh=getattr(self._lm, "mesh", None),
        )
        return make_room(cache, request.capacity)[0]

    def _fill(self) -> float:
        """Feed the prompt to the emptied cache; the seconds it took."""
        lm, context = self._lm, programs.Cached(reset(self.full))
        logits = self._put(self._blank)
        jax.block_until_ready((context, logits))
        start = time.perf_counter()
        for chunk in self._chunks:
            context, logits = programs.prefill(
                lm.architecture, lm.params, context, logits, chunk.tokens, chunk.lengths, chunk.ends
            )
        jax.block_until_ready((context, logits))
        seconds = time.perf_counter() - start
        assert context.cache is not None
        check(context.cache)
        self.full = context.cache
        self._progress, _ = programs.begin(
            logits, self.request.filters, self._settings, self._limit, None
        )
        return seconds

    def _back(
        self, run: Callable[[Any, Array], Any], cache: KVCache, steps: Array
    ) -> tuple[float, KVCache]:
        """Seconds of a step of a run, and the cache as it was before."""
        jax.block_until_ready((cache, steps))
        start = time.perf_counter()
        found = jax.block_until_ready(run(programs.Cached(cache), steps))
        seconds = time.perf_counter() - start
        check(found[0].cache)  # a loop ends early where logits are not finite
        return seconds / self.steps, rewind(found[0].cache, self.steps)

    def _whole(self, context: Any, steps: Array) -> Any:
        return self._decode(context, self._progress, steps)

    def _dispatches(self, context: Any, steps: Array) -> Any:
        progress = self._progress
        for _ in range(self.steps):
            context, progress, *_ = self._decode(context, progress, self._one)
        return context, progress

    def _bare(self, context: Any, steps: Array) -> Any:
        return _logits_loop(
            self._lm.architecture, self._lm.config.vocab_size, self._lm.params, context,
            self._tokens, self._counts, steps,
        )  # fmt: skip

    def _decode(self, context: Any, progress: Any, steps: Array) -> Any:
        return programs.decode(
            self._lm.architecture, self.request.filters, self._lm.params, context, progress, None,
            self._halt, self._settings, self._limit, steps,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("model", "vocab"), donate_argnames="context")
def _logits_loop(
    model: Model,
    vocab: int,
    params: Any,
    context: Any,
    tokens: Array,
    counts: Array,
    steps: Array,
) -> tuple[Any, Array]:
    """Steps that end in logits. Tokens differ from step to step, or a compiler would take what the
    first layer makes of them out of the loop."""

    def one(step: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        token = (tokens + step) % vocab
        logits, context = carry[0].feed(model, params, token[:, None], counts)
        return context, logits

    logits = jnp.zeros((len(tokens), vocab), jnp.float32)
    return lax.fori_loop(0, steps, one, (context, logits))


def steps_of(timed: Sequence[Timed]) -> int:
    """The most steps that all of these caches can take back.

    Raises:
      ValueError: if one can take back none.
    """
    spans = [each.full.revocable for each in timed]
    steps = min([timed[0].steps, *(span for span in spans if span is not None)])
    if steps < 1:
        raise ValueError("a ring without slack can't take back a step: give it slack=")
    return steps


def difference(more: Sequence[float], less: Sequence[float]) -> float:
    """Milliseconds between two times of the same repeats; below nothing only beyond the noise."""
    each = [1000 * (a - b) for a, b in zip(more, less, strict=True)]
    found, noise = statistics.median(each), max(each) - min(each)
    return 0.0 if -noise <= found < 0 else found
