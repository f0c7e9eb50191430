"""mlx-lm as a benchmark engine, on MLX's default device."""

from __future__ import annotations

import importlib.metadata
import time
from pathlib import Path
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]
import numpy as np
from mlx.utils import tree_flatten  # pyright: ignore[reportMissingImports]
from mlx_lm.models.cache import make_prompt_cache  # pyright: ignore[reportMissingImports]
from mlx_lm.utils import load_model  # pyright: ignore[reportMissingImports]

from benchmarks import memory
from benchmarks.bandwidth import cores, cpu_name

# As in mlx-lm's own generation: a longer prompt goes in pieces of this many tokens.
CHUNK = 2048


class MlxEngine:
    """A Llama model of mlx-lm with its plain cache, which grows in pieces of 256 tokens."""

    def __init__(self, checkpoint: str, dtype: str):
        self.model: Any = load_model(Path(checkpoint))[0]
        self.model.set_dtype(getattr(mx, dtype))
        mx.eval(self.model.parameters())
        self.cache: Any = None
        self.ahead = 0

    def describe(self) -> dict[str, Any]:
        """Versions, device and bytes of the weights."""
        names = ("mlx", "mlx-lm")
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        return {
            "versions": {name: importlib.metadata.version(name) for name in names},
            "device": cpu_name() if on_cpu else str(mx.default_device()),
            "platform": "cpu" if on_cpu else "gpu",
            "threads": cores(),
            "weight_bytes": sum(x.nbytes for _, x in tree_flatten(self.model.parameters())),
        }

    def device_peak_bytes(self) -> int | None:
        """None: this engine's memory is the process's."""
        return None

    def setup(self, prompt: str, max_len: int) -> dict[str, Any]:
        """Take the prompt, a file of int32[batch, prompt]; its cache grows as it needs."""
        self.prompt = mx.array(np.load(prompt))
        return {"compile_seconds": 0.0}

    def _call(self, tokens: mx.array) -> mx.array:
        return self.model(tokens, cache=self.cache)[:, -1]

    def prefill(self, logits: str | None = None) -> dict[str, Any]:
        """Fill a new cache with the prompt; save the last logits where `logits` names a file."""
        self.cache = None
        start = time.perf_counter()
        self.cache = make_prompt_cache(self.model)
        before, last = self.prompt[:, :-1], self.prompt[:, -1:]
        for begin in range(0, before.shape[1], CHUNK):
            # What is never evaluated is never computed: the logits of all but the last token.
            self._call(before[:, begin : begin + CHUNK])
            mx.eval([layer.state for layer in self.cache])
        found = self._call(last)
        mx.eval(found)
        seconds = time.perf_counter() - start
        self.ahead = 0
        if logits is not None:
            np.save(logits, np.array(found.astype(mx.float32)))
        return {"seconds": seconds, "init_seconds": 0.0}

    def _rewind(self) -> None:
        for layer in self.cache if self.ahead else ():
            layer.trim(self.ahead)
        self.ahead = 0

    def force(self, tokens: str, logits: str) -> None:
        """Feed int32[steps, batch] and save the float32[steps, batch, vocab] that follow each."""
        self._rewind()
        steps = mx.array(np.load(tokens))
        found = [np.array(self._call(step[:, None]).astype(mx.float32)) for step in steps]
        self.ahead = len(found)
        np.save(logits, np.stack(found))

    def decode(self, token: list[int], warm: int, steps: int) -> dict[str, Any]:
        """Decode greedily from the end of the prompt: `warm` steps untimed, `steps` timed."""
        self._rewind()
        current = mx.array(token)[:, None]
        made = []
        start = time.perf_counter()
        for index in range(warm + steps):
            if index == warm:
                mx.eval(current)
                start = time.perf_counter()
            current = mx.argmax(self._call(current), axis=-1, keepdims=True)
            # The next step is built while this one runs, as mlx-lm does it.
            mx.async_eval(current)
            made.append(current)
        mx.eval(current)
        seconds = time.perf_counter() - start
        self.ahead = warm + steps
        return {"seconds": seconds, "tokens": np.concatenate(list(map(np.array, made)), 1).tolist()}

    def drop(self) -> None:
        """Free the cache."""
        self.cache = None
        mx.clear_cache()
        memory.release()
