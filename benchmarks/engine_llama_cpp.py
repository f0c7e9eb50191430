"""llama.cpp on the same weights: a folder in the Transformers format as GGUF, and its logits.

Needs the packages ``gguf`` and ``llama-cpp-python``.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np
from safetensors import safe_open

CACHE_TYPES = {
    "f16": llama_cpp.GGML_TYPE_F16,
    "q8_0": llama_cpp.GGML_TYPE_Q8_0,
    "q5_1": llama_cpp.GGML_TYPE_Q5_1,
    "q5_0": llama_cpp.GGML_TYPE_Q5_0,
    "q4_1": llama_cpp.GGML_TYPE_Q4_1,
    "q4_0": llama_cpp.GGML_TYPE_Q4_0,
}
BITS = {"f16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5}
"""Bits of a number: groups of 32, with one or two numbers of 16 bits."""

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


def to_gguf(folder: Path, file: Path) -> None:
    """Write a Llama checkpoint in float32, without its tokenizer: it is fed token ids."""
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
            writer.add_tensor(renamed, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in GGUF's order: the two channels that turn together are neighbours."""
    halves = x.reshape(heads, 2, x.shape[0] // heads // 2, x.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(x.shape)


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
