"""GGUF files for tests: small models of every architecture, and files byte by byte."""

import json
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax import models
from kvjax.models.weights import Params, flatten

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_MOE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e4, **parameters}}


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama-linear": {"model_type": "llama", **_rope("linear", factor=4.0)},
    "llama-yarn": {
        "model_type": "llama",
        **_rope("yarn", factor=4.0, original_max_position_embeddings=16),
    },
    "llama-3": {
        "model_type": "llama",
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3moe": {"model_type": "qwen3_moe", **_MOE, "norm_topk_prob": True},
    "gemma2": {"model_type": "gemma2", **_GEMMA, "num_hidden_layers": 3},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA, "num_hidden_layers": 7},
    "phi3": {"model_type": "phi3", "sliding_window": 16},
    "phi3-longrope": {
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        **_rope("longrope", long_factor=[1.5, 2.5, 3.5, 4.5], short_factor=[1.0, 1.1, 1.2, 1.3]),
    },
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "cohere2": {
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "logit_scale": 0.5,
    },
    "gptneox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "gpt2": {"model_type": "gpt2"},
}
"""Fields of ``config.json`` of a small model of each architecture, by name."""


def random_model(
    folder: Path, name: str, changes: Mapping[str, Any] | None = None
) -> tuple[models.Architecture, Params]:
    """A model of ``MODELS`` with random parameters, and its ``config.json`` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SMALL, **MODELS[name], **(changes or {})}))
    architecture = models.Architecture(models.read_config(folder))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.standard_normal(x.shape).astype(np.float32) * 0.2 + (x.ndim == 1),
        architecture.abstract_params(),
    )
    return architecture, params


def write_random(
    file: Path, name: str, changes: Mapping[str, Any] | None = None, **options: Any
) -> tuple[models.Architecture, Params]:
    """Write a model of ``MODELS`` with random parameters; see ``write_gguf`` for the options."""
    from benchmarks.gguf_file import write_gguf

    with tempfile.TemporaryDirectory() as folder:
        architecture, params = random_model(Path(folder), name, changes)
    tensors = {key: np.asarray(leaf) for key, leaf in flatten(params)}
    write_gguf(architecture.config, tensors, file, **options)
    return architecture, params


STRING, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6
F32, Q8_0 = 0, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class RawFile:
    """A GGUF file written byte by byte, so that every field of the format may be wrong.

    ``entries``: encoded metadata entries. ``tensors``: name, shape in GGUF's order, type, offset.
    """

    entries: list[bytes] = field(default_factory=list)
    tensors: list[tuple[str, Sequence[int], int, int]] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)

    def entry(self, key: str, kind: int, value: bytes) -> "RawFile":
        self.entries.append(text(key) + struct.pack("<I", kind) + value)
        return self

    def tensor(self, name: str, shape: Sequence[int], kind: int, offset: int) -> "RawFile":
        self.tensors.append((name, shape, kind, offset))
        return self

    def write(self, path: Path) -> Path:
        counts = [
            len(have) if count is None else count
            for have, count in zip((self.tensors, self.entries), self.counts, strict=True)
        ]
        raw = self.magic + struct.pack("<IQQ", self.version, *counts) + b"".join(self.entries)
        for name, shape, kind, offset in self.tensors:
            raw += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
            raw += struct.pack("<IQ", kind, offset)
        path.write_bytes(raw + bytes(-len(raw) % 32) + self.data)
        return path
