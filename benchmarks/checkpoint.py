"""Llama checkpoints in Transformers' format: of random weights, the same on every machine, or those
of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


@dataclass(frozen=True)
class Sizes:
    """The sizes of a Llama model with tied embeddings. ``from_file``: whether its weights are those
    of a GGUF file."""

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49_152
    max_position_embeddings: int = 131_072
    from_file: bool = False

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one row holds for one token, all layers together."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * itemsize


TINY = Sizes(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=256,
    max_position_embeddings=1024,
)


FILE = "model.gguf"
"""In a checkpoint's folder: a link to the GGUF file that it was converted from."""


def stored_file(checkpoint: Path) -> Path | None:
    """The GGUF file of a checkpoint that has one."""
    file = checkpoint / FILE
    return file if file.exists() else None


def write_for_llama_cpp(checkpoint: Path, engines: Iterable[str], dtype: str) -> None:
    """Write the checkpoint as a GGUF file of a dtype, if an engine is llama.cpp and it has none."""
    if any(name.startswith("llama_cpp") for name in engines) and stored_file(checkpoint) is None:
        from benchmarks.gguf_file import to_gguf

        to_gguf(checkpoint, file_for_llama_cpp(checkpoint, dtype), dtype)


def file_for_llama_cpp(checkpoint: Path, dtype: str) -> Path:
    """The GGUF file that llama.cpp loads."""
    return stored_file(checkpoint) or checkpoint / f"{dtype}.gguf"


def convert_file(folder: Path, file: Path) -> Sizes:
    """Write the model of a GGUF file as a checkpoint of decoded weights, next to a link to it.

    Raises:
      ValueError: if it is no Llama model.
    """
    from kvjax import models

    lm = models.load(file, dtype="float32")
    if lm.config.model_type != "llama":
        raise ValueError(f"{file} is a {lm.config.model_type}; the engines run Llama models")
    lm.save(folder)
    (folder / FILE).symlink_to(file.resolve())
    numbers = {name: getattr(lm.config, name) for name in asdict(Sizes()) if name != "from_file"}
    return Sizes(**numbers, from_file=True)


def shapes(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor; linear weights are [out, in]."""
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    queries = sizes.num_attention_heads * sizes.head_dim
    keys = sizes.num_key_value_heads * sizes.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (sizes.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(sizes.num_hidden_layers):
        names |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return names


def write_checkpoint(folder: Path, sizes: Sizes, seed: int = 0) -> None:
    """Write `config.json` and float32 `model.safetensors` to `folder`.

    Weights are normal with a standard deviation of 0.02, as Transformers initialises them, and
    norms are one, all from `seed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
        **{name: value for name, value in asdict(sizes).items() if name != "from_file"},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else 0.02 * rng.standard_normal(shape, np.float32)
        for name, shape in shapes(sizes).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
