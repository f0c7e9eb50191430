"""Timing of one policy after one prompt, and the memory bandwidth, which limits a decode step."""

import contextlib
import functools
import os
import statistics
import sys
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from kvjax.core.typing import Array
from kvjax.core.validation import as_int
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

ARRAY_BYTES = 2**28
"""Default size of the array in bytes. It is much larger than processor caches."""


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth in bytes per second.

    Attributes:
      read: bandwidth of the fastest reduction, which only reads.
      copy: bandwidth of the fastest copy, counting bytes read and written.
      methods: the bandwidth of every method, by name.
      array_bytes: size of the array in bytes.

    Example:
      ```python
      bandwidth = kvjax.bench.measure_bandwidth(array_bytes=2**20, repeats=2)
      print(bandwidth.read / 1e9, "GB/s")
      ```
    """

    read: float
    copy: float
    methods: dict[str, float]
    array_bytes: int


def measure_bandwidth(array_bytes: int = ARRAY_BYTES, repeats: int = 8) -> Bandwidth:
    """Measure the memory bandwidth of the default device.

    Several methods are timed, each ``repeats`` times. Each measurement is a lower bound of the
    bandwidth, so the result is the bandwidth in the fastest call of the fastest method. On a CPU, a
    compiled reduction may not use all cores, so multithreaded NumPy reductions are tried too.

    Raises:
      ValueError: if the array has less than 4 KiB, or ``repeats`` is less than 1.

    Example:
      ```python
      bandwidth = kvjax.bench.measure_bandwidth(array_bytes=2**20, repeats=2)
      print(bandwidth.read / 1e9, "GB/s by", max(bandwidth.methods, key=bandwidth.methods.get))
      ```
    """
    as_int("array_bytes", array_bytes, 4096)
    as_int("repeats", repeats, 1)
    reads = jax_bandwidth(array_bytes, repeats)
    if jax.default_backend() == "cpu":
        reads |= cpu_bandwidth(array_bytes, repeats)
    copies = copy_bandwidth(array_bytes, repeats)
    return Bandwidth(max(reads.values()), max(copies.values()), reads | copies, array_bytes)


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """Measure the seconds of the fastest of ``repeats`` calls, after a warm-up call."""
    call()
    return min(timeit.repeat(call, number=1, repeat=repeats))


def jax_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Measure the bytes per second that jitted reductions read from an array. Returns them by
    method.

    Example:
      ```python
      print(kvjax.bench.jax_bandwidth(2**20, repeats=2))
      ```
    """
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(reduction: Callable[..., object]) -> float:
        reduced = jax.jit(reduction)
        return array.nbytes / best_seconds(lambda: reduced(array).block_until_ready(), repeats)

    return {"jax sum": speed(jnp.sum), "jax max": speed(jnp.max)}


def copy_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Measure the bytes per second that jitted copies read and write. Returns them by method."""
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(copied: Callable[..., object]) -> float:
        # Donate the output, because allocating new memory pages is slower than copying.
        into = jax.jit(lambda x, old: copied(x), donate_argnums=1, keep_unused=True)
        output = jnp.zeros_like(array)

        def call() -> None:
            nonlocal output
            output = into(array, output).block_until_ready()

        return 2 * array.nbytes / best_seconds(call, repeats)

    return {"jax copy": speed(jnp.copy), "jax add": speed(lambda x: x + 1)}


def cpu_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Measure the bytes per second that NumPy reductions read with one thread per core. Returns
    them by method.

    Example:
      ```python
      print(kvjax.bench.cpu_bandwidth(2**20, repeats=2))
      ```
    """
    array = np.ones(nbytes // 4, np.float32)
    allowed = getattr(os, "sched_getaffinity", None)  # the cores this process may run on
    threads = len(allowed(0)) if allowed else os.cpu_count() or 1
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:

        def speed(reduction: Callable[..., object]) -> float:
            return array.nbytes / best_seconds(lambda: list(pool.map(reduction, parts)), repeats)

        return {"numpy max": speed(np.max), "numpy dot": speed(lambda part: np.dot(part, part))}


def peak_memory() -> tuple[int | None, str]:
    """Return the peak of memory use since the process started, in bytes, and where it was counted.

    It is the peak of the device (``"device"``) if the device reports one. Otherwise it is the peak
    of the process's resident set (``"process"``). The bytes are None if neither is known.

    Example:
      ```python
      nbytes, source = kvjax.bench.peak_memory()
      ```
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    if sys.platform == "win32":
        return None, "nothing"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"


class PolicyTimer:
    """Times runs on two caches of a policy: one holds the prompt, the other a single token.

    ``shape`` is the number of rows and of prompt tokens per row. ``allocated`` has the bytes of one
    cache, by place. ``seconds`` has lists with one number per repeat:

    - ``"whole"``: a step of the decode loop.
    - ``"logits"``: a step without sampling.
    - ``"first"``: a step without sampling after a single token.
    - ``"single"``: a step that is dispatched alone.
    - ``"prefill"``: the prefill of the whole prompt.
    """

    def __init__(
        self,
        lm: LanguageModel,
        policy: PolicyChoice,
        prompt: np.ndarray,
        steps: int,
        drawing: SamplingKeywords,
    ) -> None:
        # A run of `steps` steps reads the token before it, but not its own last token.
        options = GenerationOptions(
            max_new_tokens=steps + 1, cache=policy, eos_token_ids=(), **drawing
        )
        request = prepare_request(lm, prompt.tolist(), options)
        if request.mesh_sharding is not None:
            request.mesh_sharding.check_rows(len(prompt))
        # Runs are rewound, so their total number of tokens is unlimited. The cache never grows.
        self.request = replace(request, max_new_tokens=UNLIMITED, max_len=request.capacity)
        self._lm, self.steps, self.shape = lm, steps, prompt.shape
        self.meter = Timer()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        with self.meter.running():
            self._full, self._nearly_empty = self._started(), self._started()
            self.allocated = self._full.cache_bytes
            self._chunks = prompt_chunks(self.request)
            # Put the loops' arguments on the device once, so that no step waits for them.
            self._one = self._full.put(np.int32(1))
            self._halt = self._full.put(np.zeros(len(prompt), bool))
            counts = np.ones(len(prompt), np.int32)
            self._tokens, self._counts = self._full.put((prompt[:, 0], counts))

    def run(self, *, counted: bool, prefill: bool) -> None:
        """Time every run once. The first round, which compiles and fills the caches, is not
        counted.

        Raises:
          NonFiniteError: if the model returns logits that are not finite.
        """
        times, full, short, one = {}, self._full, self._nearly_empty, self._one
        decode = functools.partial(full.decode, halt=self._halt)
        with contextlib.nullcontext() if counted else self.meter.running():
            if prefill or not counted:
                times["prefill"] = self._time_prefill()
            if not counted:
                self._decode_logits(short, one)
            steps = jax.block_until_ready(full.put(np.int32(self.steps)))
            times["whole"] = self._time(full, lambda: decode(steps))
            times["logits"] = self._time(full, lambda: self._decode_logits(full, steps))
            times["first"] = self._time(short, lambda: self._decode_logits(short, steps))
            times["single"] = self._time(full, lambda: [decode(one) for _ in range(self.steps)])
        if counted:
            for name, seconds in times.items():
                self.seconds[name].append(seconds)

    @property
    def max_rewind(self) -> int:
        """The number of steps by which the caches can be rewound, at most ``steps``."""
        assert self._full.cache is not None
        most = self._full.cache.max_rewind
        return self.steps if most is None else min(self.steps, most)

    def drop(self) -> None:
        """Free the caches and other arrays on the device."""
        del self._full, self._nearly_empty, self._chunks

    def _started(self) -> Session:
        session = Session(self._lm, self.request)
        session.start()
        session.make_room(self.request.capacity)
        return session

    def _time_prefill(self) -> float:
        """Empty the cache and prefill it again. Returns the seconds of the prefill."""
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

    def _time(self, session: Session, run: Callable[[], PyTree]) -> float:
        """Measure the seconds per step of a run, and rewind the cache afterwards."""
        jax.block_until_ready(session.context)
        start = time.perf_counter()
        jax.block_until_ready((run(), session.context))
        seconds = time.perf_counter() - start
        session.check()  # non-finite logits end a loop early
        session.rewind(self.steps)
        return seconds / self.steps

    def _decode_logits(self, session: Session, steps: Array) -> Array:
        session.context, logits = _logits_loop(
            self._lm.architecture,
            self._lm.config.vocab_size,
            self._lm.params,
            session.context,
            self._tokens,
            self._counts,
            steps,
        )
        return logits


@functools.partial(jax.jit, static_argnames=("model", "vocab"), donate_argnames="context")
def _logits_loop(
    model: Model,
    vocab: int,
    params: PyTree,
    context: Any,
    tokens: Array,
    counts: Array,
    steps: Array,
) -> tuple[Any, Array]:
    """Run decode steps without sampling.

    Tokens differ from step to step. Otherwise the compiler could move the first layer's work on
    them out of the loop.
    """

    def one(step: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        token = (tokens + step) % vocab
        logits, context = carry[0].forward(model, params, token[:, None], counts)
        return context, logits

    logits = jnp.zeros((len(tokens), vocab), jnp.float32)
    return lax.fori_loop(0, steps, one, (context, logits))


def difference(more: Sequence[float], less: Sequence[float]) -> float:
    """Return the median of ``more - less`` over the repeats, in milliseconds.

    A negative median is replaced by 0 if its size is at most the spread of the differences.
    """
    differences = [1000 * (a - b) for a, b in zip(more, less, strict=True)]
    median, noise = statistics.median(differences), max(differences) - min(differences)
    return 0.0 if -noise <= median < 0 else median
