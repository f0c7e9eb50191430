"""Transformers as a benchmark engine: one cache class, one attention, compiled or not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

from benchmarks import memory
from benchmarks.bandwidth import cores, cpu_name

# Eager attention holds a score for every pair; longer prompts go in pieces of this many tokens.
EAGER_CHUNK = 2048


class TransformersEngine:
    """A Llama model of Transformers on the CPU with one kind of cache and of attention.

    The attention `"compile"` is `sdpa` in a decode step that `torch.compile` has compiled; prompts
    go through the module as it is, as `generate` does it.
    """

    def __init__(self, checkpoint: str, dtype: str, cache: str, attention: str):
        torch.set_num_threads(cores())
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.kind = cache
        self.attention = attention
        compiled = attention == "compile"
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=getattr(torch, dtype),
            attn_implementation="sdpa" if compiled else attention,
        ).eval()
        self.step: Any = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.cache: Any = None
        self.ahead = 0

    def describe(self) -> dict[str, Any]:
        """Versions, device and bytes of the weights."""
        return {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "device": cpu_name(),
            "platform": "cpu",
            "threads": torch.get_num_threads(),
            "weight_bytes": sum(p.nbytes for p in self.model.parameters()),
        }

    def device_peak_bytes(self) -> int | None:
        """None: this engine's memory is the process's."""
        return None

    def setup(self, prompt: str, max_len: int) -> dict[str, Any]:
        """Take the prompt, a file of int32[batch, prompt], and room for `max_len` tokens."""
        self.prompt = torch.from_numpy(np.load(prompt)).long()
        self.max_len = max_len
        if self.step is self.model:
            return {"compile_seconds": 0.0}
        torch.compiler.reset()
        self.prefill()
        start = time.perf_counter()
        self._call(self.step, self.prompt[:, :1])
        seconds = time.perf_counter() - start
        self.drop()
        return {"compile_seconds": seconds}

    def _call(self, model: Any, tokens: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return model(
                input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]

    def prefill(self, logits: str | None = None) -> dict[str, Any]:
        """Fill a new cache with the prompt; save the last logits where `logits` names a file."""
        self.cache = None
        chunk = EAGER_CHUNK if self.attention == "eager" else self.prompt.shape[1]
        start = time.perf_counter()
        if self.kind == "dynamic":
            self.cache = transformers.DynamicCache(config=self.model.config)
        else:
            self.cache = transformers.StaticCache(
                config=self.model.config, max_cache_len=self.max_len
            )
        pieces = torch.split(self.prompt, chunk, dim=1)
        last = [self._call(self.model, piece) for piece in pieces][-1]
        seconds = time.perf_counter() - start
        self.ahead = 0
        if logits is not None:
            np.save(logits, last.float().numpy())
        return {"seconds": seconds, "init_seconds": 0.0}

    def _rewind(self) -> None:
        for layer in self.cache.layers if self.ahead else ():
            if self.kind == "dynamic":
                layer.crop(-self.ahead)
            else:
                layer.cumulative_length.sub_(self.ahead)
        self.ahead = 0

    def force(self, tokens: str, logits: str) -> None:
        """Feed int32[steps, batch] and save the float32[steps, batch, vocab] that follow each."""
        self._rewind()
        steps = torch.from_numpy(np.load(tokens)).long()
        found = [self._call(self.step, step[:, None]).float().numpy() for step in steps]
        self.ahead = len(found)
        np.save(logits, np.stack(found))

    def decode(self, token: list[int], warm: int, steps: int) -> dict[str, Any]:
        """Decode greedily from the end of the prompt: `warm` steps untimed, `steps` timed."""
        self._rewind()
        current = torch.tensor(token)[:, None]
        made = []
        start = time.perf_counter()
        for index in range(warm + steps):
            if index == warm:
                start = time.perf_counter()
            current = self._call(self.step, current).argmax(-1, keepdim=True)
            made.append(current)
        seconds = time.perf_counter() - start
        self.ahead = warm + steps
        return {"seconds": seconds, "tokens": torch.cat(made, 1).tolist()}

    def drop(self) -> None:
        """Free the cache."""
        self.cache = None
        memory.release()
