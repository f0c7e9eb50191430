"""OpenVINO as a benchmark engine: a model written in its operations, with the caches as state."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov  # pyright: ignore[reportMissingImports]

from benchmarks import memory
from benchmarks.bandwidth import cores, cpu_name
from benchmarks.openvino_model import Builder

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenvinoEngine:
    """A Llama model of OpenVINO on the CPU, its weights and its caches in the run's dtype."""

    def __init__(self, checkpoint: str, dtype: str):
        core = ov.Core()
        start = time.perf_counter()
        precision = PRECISIONS[dtype]
        builder = Builder(Path(checkpoint))
        self.compiled = core.compile_model(
            builder.model(),
            "CPU",
            {
                "INFERENCE_PRECISION_HINT": precision,
                # Its own choice would be 8 bits.
                "KV_CACHE_PRECISION": precision,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": cores(),
            },
        )
        self.compile_seconds = time.perf_counter() - start
        itemsize = 4 if dtype == "float32" else 2
        self.weight_bytes = itemsize * builder.numbers
        self.request: Any = None

    def describe(self) -> dict[str, Any]:
        """Versions, device and bytes of the weights."""
        return {
            "versions": {"openvino": ov.__version__.partition("-")[0]},
            "device": cpu_name(),
            "platform": "cpu",
            "threads": cores(),
            "weight_bytes": self.weight_bytes,
        }

    def device_peak_bytes(self) -> int | None:
        """None: this engine's memory is the process's."""
        return None

    def setup(self, prompt: str, max_len: int) -> dict[str, Any]:
        """Take the prompt, a file of int32[batch, prompt]; its caches grow as they need."""
        self.prompt = np.load(prompt).astype(np.int64)
        return {"compile_seconds": self.compile_seconds}

    def _call(self, tokens: np.ndarray, begin: int) -> np.ndarray:
        """Feed int64[batch, tokens]; a view of float32[batch, vocab] after the last of them."""
        end = begin + tokens.shape[1]
        inputs = (
            tokens,
            np.arange(begin, end),
            np.arange(end),
            np.arange(len(tokens), dtype=np.int32),
        )
        for index, given in enumerate(inputs):
            self.request.set_input_tensor(index, ov.Tensor(given))
        self.request.infer()
        return self.request.get_output_tensor(0).data

    def prefill(self, logits: str | None = None) -> dict[str, Any]:
        """Fill a new cache with the prompt; save the last logits where `logits` names a file."""
        self.drop()
        start = time.perf_counter()
        self.request = self.compiled.create_infer_request()
        middle = time.perf_counter()
        last = self._call(self.prompt, 0)
        seconds = time.perf_counter() - middle
        if logits is not None:
            np.save(logits, last)
        # State can't be cut short, only set: this is what the caches hold behind the prompt.
        self.saved = [(state, state.state) for state in self.request.query_state()]
        return {"seconds": seconds, "init_seconds": middle - start}

    def _rewind(self) -> None:
        for state, held in self.saved:
            state.state = held

    def force(self, tokens: str, logits: str) -> None:
        """Feed int32[steps, batch] and save the float32[steps, batch, vocab] that follow each."""
        self._rewind()
        steps = np.load(tokens).astype(np.int64)
        length = self.prompt.shape[1]
        found = [self._call(x[:, None], length + i).copy() for i, x in enumerate(steps)]
        np.save(logits, np.stack(found))

    def decode(self, token: list[int], warm: int, steps: int) -> dict[str, Any]:
        """Decode greedily from the end of the prompt: `warm` steps untimed, `steps` timed."""
        self._rewind()
        current = np.array(token, np.int64)[:, None]
        length, made = self.prompt.shape[1], []
        start = time.perf_counter()
        for index in range(warm + steps):
            if index == warm:
                start = time.perf_counter()
            current = self._call(current, length + index).argmax(-1, keepdims=True)
            made.append(current)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": np.concatenate(made, 1).tolist()}

    def drop(self) -> None:
        """Free the cache."""
        self.request, self.saved = None, []
        memory.release()
