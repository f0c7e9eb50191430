"""kvjax as a benchmark engine: a decode step of the kind a user writes."""

from __future__ import annotations

import functools
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import memory
from benchmarks.bandwidth import cores, cpu_bandwidth, cpu_name, jax_bandwidth
from benchmarks.checkpoint import stored_file
from kvjax import models


def timed(call: Any, *args: Any) -> tuple[float, Any]:
    """Seconds until everything that `call` returns is there, and what it returns."""
    start = time.perf_counter()
    value = jax.block_until_ready(call(*args))
    return time.perf_counter() - start, value


class KvjaxEngine:
    """A Llama model of kvjax on JAX's default device, its cache a plain `static` one."""

    def __init__(self, checkpoint: str, dtype: str):
        self.lm = models.load(stored_file(Path(checkpoint)) or checkpoint, dtype=dtype)
        self.policy = kvjax.policy("static")
        self.cache: Any = None
        self.ahead = 0
        lm = self.lm

        @functools.partial(jax.jit, donate_argnames="cache")
        def decode_step(params, token, cache):
            logits, cache = lm.apply(params, token[:, None], cache)
            return jnp.argmax(logits[:, -1], axis=-1), cache

        @functools.partial(jax.jit, donate_argnames="cache")
        def logits_step(params, token, cache):
            logits, cache = lm.apply(params, token[:, None], cache)
            return logits[:, -1], cache

        @functools.partial(jax.jit, donate_argnames="cache")
        def prefill(params, tokens, cache):
            logits, cache = lm.apply(params, tokens, cache, last_only=True)
            return logits[:, -1], cache

        @jax.jit
        def whole_pass(params, tokens):
            return lm.apply(params, tokens, last_only=True)[:, -1]

        self._decode_step = decode_step
        self._logits_step = logits_step
        self._prefill_jit = prefill
        self._whole_pass_jit = whole_pass

    def describe(self) -> dict[str, Any]:
        """Versions, device and bytes of the weights."""
        device = jax.devices()[0]
        on_cpu = device.platform == "cpu"
        return {
            "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
            "device": cpu_name() if on_cpu else device.device_kind,
            "platform": device.platform,
            "threads": cores(),
            "weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self.lm.params)),
        }

    def programs(self) -> dict[str, Any]:
        """The jitted decode step, and the prefill of a prompt: of parameters, tokens, cache."""
        return {"step": self._decode_step, "prompt": self._prefill_jit}

    def device_peak_bytes(self) -> int | None:
        """The most bytes ever in use on an accelerator; None on a CPU, or where it is not told."""
        device = jax.devices()[0]
        stats = None if device.platform == "cpu" else device.memory_stats()
        return None if stats is None else stats.get("peak_bytes_in_use")

    def bandwidth(self, nbytes: int) -> dict[str, float]:
        """Bytes a second read from an array of `nbytes`, by method."""
        found = jax_bandwidth(nbytes)
        if jax.default_backend() == "cpu":
            found |= cpu_bandwidth(nbytes)
        memory.release()
        return found

    def _init(self, batch: int, max_len: int) -> Any:
        cache = kvjax.init_cache(self.lm.config, self.policy, batch=batch, max_len=max_len)
        return jax.block_until_ready(cache)

    def setup(self, prompt: str, max_len: int) -> dict[str, Any]:
        """Take the prompt, a file of int32[batch, prompt], and compile for `max_len` tokens."""
        self.tokens = self._put(np.load(prompt))
        self.max_len = max_len
        params = self.lm.params
        start = time.perf_counter()
        cache = self._init(self.tokens.shape[0], max_len)
        self._prefill = self._prefill_jit.lower(params, self.tokens, cache).compile()
        self._whole_pass = self._whole_pass_jit.lower(params, self.tokens).compile()
        cache = self._decode_step(params, self.tokens[:, 0], cache)
        return {"compile_seconds": time.perf_counter() - start}

    def _put(self, values: Any) -> Any:
        # Committed like the cache: beside it, an uncommitted array would compile the step twice.
        return jax.device_put(jnp.asarray(values, jnp.int32), jax.devices()[0])

    def filled(self, prompt: np.ndarray, max_len: int) -> tuple[Any, Any]:
        """A prompt on the device, and a new cache that holds it.

        It is fed in calls of as many tokens as the cache takes at once.
        """
        tokens = self._put(prompt)
        cache = self._init(tokens.shape[0], max_len)
        chunk = cache.chunk or tokens.shape[1]
        for begin in range(0, tokens.shape[1], chunk):
            piece = tokens[:, begin : begin + chunk]
            cache = jax.block_until_ready(self._prefill_jit(self.lm.params, piece, cache)[1])
        kvjax.check(cache)
        return tokens, cache

    def prefill(self, logits: str | None = None) -> dict[str, Any]:
        """Fill a new cache with the prompt; save the last logits where `logits` names a file."""
        self.cache = None
        init_seconds, cache = timed(self._init, self.tokens.shape[0], self.max_len)
        seconds, (last, self.cache) = timed(self._prefill, self.lm.params, self.tokens, cache)
        self.ahead = 0
        kvjax.check(self.cache)
        if logits is not None:
            np.save(logits, np.asarray(last, np.float32))
        return {"seconds": seconds, "init_seconds": init_seconds}

    def uncached(self, logits: str | None = None) -> dict[str, Any]:
        """One step without a cache: a pass over the whole prompt for one row of logits."""
        seconds, last = timed(self._whole_pass, self.lm.params, self.tokens)
        if logits is not None:
            np.save(logits, np.asarray(last, np.float32))
        return {"seconds": seconds}

    def _rewind(self) -> None:
        if self.ahead:
            self.cache = jax.block_until_ready(kvjax.rewind(self.cache, self.ahead))
        self.ahead = 0

    def force(self, tokens: str, logits: str) -> None:
        """Feed int32[steps, batch] and save the float32[steps, batch, vocab] that follow each."""
        self._rewind()
        found = []
        for step in np.load(tokens):
            last, self.cache = self._logits_step(self.lm.params, self._put(step), self.cache)
            found.append(np.asarray(last, np.float32))
        self.ahead = len(found)
        kvjax.check(self.cache)
        np.save(logits, np.stack(found))

    def decode(self, token: list[int], warm: int, steps: int) -> dict[str, Any]:
        """Decode greedily from the end of the prompt: `warm` steps untimed, `steps` timed.

        Steps are dispatched one after another and waited for once, at the end.
        """
        self._rewind()
        self.cache, seconds, made = self.group(self.cache, self._put(token), warm, steps)
        self.ahead = warm + steps
        kvjax.check(self.cache)
        return {"seconds": seconds, "tokens": np.stack(made, 1).tolist()}

    def group(self, cache: Any, token: Any, warm: int, steps: int) -> tuple[Any, float, list[Any]]:
        """Decode from a cache; it, the seconds of the timed steps, and every step's tokens."""
        params, step = self.lm.params, self._decode_step
        made = []
        for _ in range(warm):
            token, cache = step(params, token, cache)
            made.append(token)
        jax.block_until_ready((token, cache))
        start = time.perf_counter()
        for _ in range(steps):
            token, cache = step(params, token, cache)
            made.append(token)
        jax.block_until_ready((token, cache))
        return cache, time.perf_counter() - start, made

    def capacity(
        self, prompt: str, max_lens: list[int], warm: int, steps: int, repeats: int
    ) -> dict[str, Any]:
        """Time groups of steps after one prompt in caches of several capacities, in turn."""
        self.drop()
        tokens = self._put(np.load(prompt))
        caches = {}
        for max_len in max_lens:
            cache = self._init(tokens.shape[0], max_len)
            caches[max_len] = self._prefill_jit(self.lm.params, tokens, cache)[1]
        seconds = self.in_turn(caches, tokens[:, 0], warm, steps, repeats)
        return {"seconds": [seconds[max_len] for max_len in max_lens]}

    def in_turn(
        self, caches: dict[Any, Any], token: Any, warm: int, steps: int, repeats: int
    ) -> dict[Any, list[float]]:
        """Seconds of groups of steps from each of several caches, which are used up."""
        seconds: dict[Any, list[float]] = {name: [] for name in caches}
        names, warm = list(caches), max(warm, 1)
        # The first group of each compiles.
        for repeat in range(repeats + 1):
            for name in names if repeat % 2 else names[::-1]:
                cache, spent, _ = self.group(caches.pop(name), token, warm, steps)
                kvjax.check(cache)
                caches[name] = kvjax.rewind(cache, warm + steps)
                if repeat:
                    seconds[name].append(spent)
        return seconds

    def generate(self, new_tokens: int, repeats: int) -> dict[str, Any]:
        """`kvjax.generate` itself: its decode loop on the device, by its own statistics."""
        self.drop()
        prompts = np.asarray(self.tokens).tolist()
        runs = [
            kvjax.generate(self.lm, prompts, max_new_tokens=new_tokens).stats
            for _ in range(repeats)
        ]
        speed = statistics.median(stats.decode_tokens_per_second for stats in runs)
        return {"new_tokens": new_tokens, "decode_tokens_per_second": speed}

    def drop(self) -> None:
        """Free the cache."""
        self.cache = None
        memory.release()
