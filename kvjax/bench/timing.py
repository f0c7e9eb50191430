"""A policy's caches behind one prompt, and what ``kvjax.bench`` times on them."""

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.typing import Array
from kvjax.generation import programs
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.options import GenerationOptions
from kvjax.generation.request import prepare_request, prompt_chunks
from kvjax.generation.results import Timer
from kvjax.generation.session import Session
from kvjax.layouts import UNLIMITED
from kvjax.operations.rows import reset
from kvjax.policies.presets import PolicyChoice
from kvjax.sampling.params import SamplingKeywords


class PolicyTimer:
    """Two caches of a policy, one with the prompt and one with a token, and times of runs on them.

    ``shape``: of the prompts, batch and tokens. ``allocated``: bytes of one of the caches, by
    place. ``seconds``, a number a repeat: of a step of the decode loop (``"whole"``), without a
    sampler (``"logits"``), and that behind a single token (``"first"``), of a step a dispatch
    (``"single"``), and of the whole prompt (``"prefill"``).
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: PolicyChoice,
        prompt: np.ndarray,
        steps: int,
        drawing: SamplingKeywords,
    ) -> None:
        # Steps read the token that they begin with, and the last of theirs is not read.
        options = GenerationOptions(
            max_new_tokens=steps + 1, cache=policy, eos_token_ids=(), **drawing
        )
        request = prepare_request(lm, prompt.tolist(), options)
        if request.spread is not None:
            request.spread.check_rows(len(prompt))
        # Steps are taken back, so a row may come to any number of them; a cache never grows.
        self.request = replace(request, max_new_tokens=UNLIMITED, max_len=request.capacity)
        self._lm, self.steps, self.shape = lm, steps, prompt.shape
        self.meter = Timer()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        with self.meter.running():
            self._full, self._nearly_empty = self._started(), self._started()
            self.allocated = self._full.cache_bytes
            self._chunks = prompt_chunks(self.request)
            # The loops' arguments, there once: a step a dispatch is not to wait for them.
            self._one = self._full.put(np.int32(1))
            self._halt = self._full.put(np.zeros(len(prompt), bool))
            counts = np.ones(len(prompt), np.int32)
            self._tokens, self._counts = self._full.put((prompt[:, 0], counts))

    def run(self, *, counted: bool, prefill: bool) -> None:
        """One round of everything; the first one compiles, fills the caches and is not counted. A
        ``NonFiniteError`` if the model gives logits that are not finite."""
        found, full, nearly, one = {}, self._full, self._nearly_empty, self._one
        decode = functools.partial(full.decode, halt=self._halt)
        with contextlib.nullcontext() if counted else self.meter.running():
            if prefill or not counted:
                found["prefill"] = self._fill()
            if not counted:
                self._bare(nearly, one)
            steps = jax.block_until_ready(full.put(np.int32(self.steps)))
            found["whole"] = self._back(full, lambda: decode(steps))
            found["logits"] = self._back(full, lambda: self._bare(full, steps))
            found["first"] = self._back(nearly, lambda: self._bare(nearly, steps))
            found["single"] = self._back(full, lambda: [decode(one) for _ in range(self.steps)])
        if counted:
            for kind, seconds in found.items():
                self.seconds[kind].append(seconds)

    @property
    def max_rewind(self) -> int:
        """How many steps the caches can take back."""
        assert self._full.cache is not None
        most = self._full.cache.max_rewind
        return self.steps if most is None else min(self.steps, most)

    def drop(self) -> None:
        """Free the caches, and what else is on the device."""
        del self._full, self._nearly_empty, self._chunks

    def _started(self) -> Session:
        session = Session(self._lm, self.request)
        session.start()
        session.make_room(self.request.capacity)
        return session

    def _fill(self) -> float:
        """Feed the prompt to the emptied cache; the seconds it took."""
        session = self._full
        assert session.cache is not None
        session.start(programs.Cached(reset(session.cache)))
        jax.block_until_ready((session.context, session.logits))
        start = time.perf_counter()
        for chunk in self._chunks:
            session.prefill(chunk)
        jax.block_until_ready((session.context, session.logits))
        seconds = time.perf_counter() - start
        session.check()
        session.begin()
        return seconds

    def _back(self, session: Session, run: Callable[[], Any]) -> float:
        """Seconds of a step of a run, after which the cache is as it was before."""
        jax.block_until_ready(session.context)
        start = time.perf_counter()
        jax.block_until_ready((run(), session.context))
        seconds = time.perf_counter() - start
        session.check()  # a loop ends early where logits are not finite
        session.rewind(self.steps)
        return seconds / self.steps

    def _bare(self, session: Session, steps: Array) -> Any:
        session.context, logits = _logits_loop(
            self._lm.architecture, self._lm.config.vocab_size, self._lm.params, session.context,
            self._tokens, self._counts, steps,
        )  # fmt: skip
        return logits


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
        logits, context = carry[0].forward(model, params, token[:, None], counts)
        return context, logits

    logits = jnp.zeros((len(tokens), vocab), jnp.float32)
    return lax.fori_loop(0, steps, one, (context, logits))


def difference(more: Sequence[float], less: Sequence[float]) -> float:
    """Milliseconds between two times of the same repeats; below nothing only beyond the noise."""
    each = [1000 * (a - b) for a, b in zip(more, less, strict=True)]
    found, noise = statistics.median(each), max(each) - min(each)
    return 0.0 if -noise <= found < 0 else found
