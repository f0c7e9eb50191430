"""llama.cpp as a benchmark engine, on the same weights, and its logits of whole texts.

Needs the package ``llama-cpp-python``; ``benchmarks.checkpoint`` writes the file that it loads.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

from benchmarks import memory
from benchmarks.bandwidth import cores, cpu_name
from benchmarks.checkpoint import file_for_llama_cpp

CACHE_TYPES = {
    "f32": llama_cpp.GGML_TYPE_F32,
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
BITS = {"f32": 32, "f16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}
"""Bits of a number: quantized in groups of 32, with one or two numbers of 16 bits."""


def check(code: int, call: str) -> None:
    """Raise what a call of the C library returned, if it failed."""
    if code != 0:
        raise RuntimeError(f"llama.cpp: {call} returned {code}")


class Batch:
    """A ``llama_batch``: a row of tokens for each sequence, all at once."""

    def __init__(self, rows: int, columns: int):
        count = rows * columns
        self.raw = llama_cpp.llama_batch_init(count, 0, 1)
        self.raw.n_tokens = count
        fields = (self.raw.token, self.raw.pos, self.raw.logits)
        views = (np.ctypeslib.as_array(field, (count,)) for field in fields)
        self.tokens, self.positions, self.wanted = (x.reshape(rows, columns) for x in views)
        for index in range(count):
            self.raw.n_seq_id[index] = 1
            self.raw.seq_id[index][0] = index // columns
        self.wanted[:] = 0
        self.wanted[:, -1] = 1
        self.last = [row * columns + columns - 1 for row in range(rows)]

    def __del__(self) -> None:
        llama_cpp.llama_batch_free(self.raw)


class LlamaCppEngine:
    """A Llama model of llama.cpp on the CPU, a row of the batch a sequence of its own cache.

    With flash attention, unless `attention` is `"plain"`: that makes steps behind long prompts a
    little faster, and prompts much slower.
    """

    def __init__(self, checkpoint: str, dtype: str, cache: str, attention: str = "flash"):
        self.cache_type = cache
        self.flash = attention == "flash"
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        # Weights in this process's own memory, as the other engines have them.
        params.use_mmap = False
        file = file_for_llama_cpp(Path(checkpoint), dtype)
        found: Any = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not found:
            raise RuntimeError("llama.cpp could not load the model")
        self.model = found
        vocab: Any = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.context: Any = None

    def describe(self) -> dict[str, Any]:
        """Versions, device and bytes of the weights and of a number in the cache."""
        return {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "device": cpu_name(),
            "platform": "cpu",
            "threads": cores(),
            "weight_bytes": llama_cpp.llama_model_size(self.model),
            "cache_itemsize": BITS[self.cache_type] / 8,
        }

    def device_peak_bytes(self) -> int | None:
        """None: this engine's memory is the process's."""
        return None

    def setup(self, prompt: str, max_len: int) -> dict[str, Any]:
        """Take the prompt, a file of int32[batch, prompt], and room for `max_len` tokens."""
        tokens = np.load(prompt)
        self.rows, self.length = tokens.shape
        self.max_len = max_len
        self.prompt = Batch(*tokens.shape)
        self.prompt.tokens[:] = tokens
        self.prompt.positions[:] = np.arange(self.length)
        self.step = Batch(self.rows, 1)
        return {"compile_seconds": 0.0}

    def _open(self) -> None:
        params = llama_cpp.llama_context_default_params()
        # Its room is shared out among the sequences, in pieces of 256.
        params.n_ctx = self.rows * (-(-self.max_len // 256) * 256)
        params.n_seq_max = self.rows
        params.kv_unified = False
        params.n_batch = self.rows * self.length
        params.n_threads = params.n_threads_batch = cores()
        params.type_k = params.type_v = CACHE_TYPES[self.cache_type]
        params.flash_attn_type = int(self.flash)
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp could not make a context")

    def _logits(self, batch: Batch) -> list[np.ndarray]:
        """Feed a batch; views of each row's last logits, in the library's own memory."""
        check(llama_cpp.llama_decode(self.context, batch.raw), "llama_decode")
        found = (llama_cpp.llama_get_logits_ith(self.context, index) for index in batch.last)
        return [np.ctypeslib.as_array(pointer, (self.vocab,)) for pointer in found]

    def _next(self, tokens: Any, ahead: int) -> list[np.ndarray]:
        self.step.tokens[:, 0] = tokens
        self.step.positions[:] = self.length + ahead
        return self._logits(self.step)

    def prefill(self, logits: str | None = None) -> dict[str, Any]:
        """Fill a new cache with the prompt; save the last logits where `logits` names a file."""
        self._close()
        start = time.perf_counter()
        self._open()
        middle = time.perf_counter()
        last = self._logits(self.prompt)
        seconds = time.perf_counter() - middle
        if logits is not None:
            np.save(logits, np.stack(last))
        return {"seconds": seconds, "init_seconds": middle - start}

    def _rewind(self) -> None:
        held: Any = llama_cpp.llama_get_memory(self.context)
        for row in range(self.rows):
            llama_cpp.llama_memory_seq_rm(held, row, self.length, -1)

    def force(self, tokens: str, logits: str) -> None:
        """Feed int32[steps, batch] and save the float32[steps, batch, vocab] that follow each."""
        self._rewind()
        steps = np.load(tokens)
        # The next step writes where this one's views look.
        np.save(logits, np.stack([np.stack(self._next(x, i)) for i, x in enumerate(steps)]))

    def decode(self, token: list[int], warm: int, steps: int) -> dict[str, Any]:
        """Decode greedily from the end of the prompt: `warm` steps untimed, `steps` timed."""
        self._rewind()
        current: Any = token
        made = []
        start = time.perf_counter()
        for index in range(warm + steps):
            if index == warm:
                start = time.perf_counter()
            current = [int(row.argmax()) for row in self._next(current, index)]
            made.append(current)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": np.array(made).T.tolist()}

    def _close(self) -> None:
        if self.context:
            llama_cpp.llama_free(self.context)
        self.context = None

    def drop(self) -> None:
        """Free the cache."""
        self._close()
        memory.release()


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    """Its log would fill the worker's standard error."""


def logits(
    file: Path, windows: np.ndarray, keys: str, values: str, *, batch: int = 64
) -> np.ndarray:
    """Logits after each token, float32[windows, tokens, vocabulary].

    What a token sees is as the cache stores it, the token itself included, so ``batch`` tokens may
    be fed at once.
    """
    context = windows.shape[1]
    model = llama_cpp.Llama(
        str(file), n_ctx=context, n_batch=batch, n_ubatch=batch, logits_all=True, flash_attn=True,
        type_k=CACHE_TYPES[keys], type_v=CACHE_TYPES[values], verbose=False,
    )  # fmt: skip
    found = []
    for window in windows:
        model.reset()
        model.eval(window.tolist())
        found.append(np.array(model.scores[:context], np.float32))
    model.close()
    return np.stack(found)
