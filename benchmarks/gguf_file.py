"""A Llama checkpoint in the Transformers format as a GGUF file; needs the package ``gguf``."""

from __future__ import annotations

import json
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np
from safetensors import safe_open

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def to_gguf(folder: Path, file: Path, dtype: str = "float32") -> None:
    """Write a Llama checkpoint without its tokenizer: it is fed token ids.

    ``dtype``: of the matrices, float32 or bfloat16; llama.cpp wants norms in float32.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    with safe_open(folder / "model.safetensors", framework="np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (no mapping)
            x = np.asarray(tensors.get_tensor(name), np.float32)
            *place, _ = name.split(".")
            if place[:2] == ["model", "layers"]:
                part = ".".join(place[3:])
                if part in ("self_attn.q_proj", "self_attn.k_proj"):
                    x = _interleaved(x, heads if part.endswith("q_proj") else kv_heads)
                renamed = f"blk.{place[2]}.{PARTS[part]}.weight"
            else:
                renamed = {
                    "model.embed_tokens": "token_embd.weight",
                    "model.norm": "output_norm.weight",
                    "lm_head": "output.weight",
                }[".".join(place)]
            if dtype == "bfloat16" and x.ndim > 1:
                bits = gguf.quantize(x, gguf.GGMLQuantizationType.BF16)
                writer.add_tensor(renamed, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
            else:
                writer.add_tensor(renamed, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in GGUF's order: the two channels that turn together are neighbours."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, x.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)
