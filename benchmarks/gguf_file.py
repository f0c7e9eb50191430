"""Write a model as a GGUF file, as llama.cpp's converter does; needs the package ``gguf``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np

from kvjax import models
from kvjax.models.config import Config
from kvjax.models.gguf import ARCHITECTURES
from kvjax.models.rope import inverse_frequencies
from kvjax.models.weights import flatten

# Of several architectures of a family the first.
NAMES = {known.model_type: name for name, known in reversed(ARCHITECTURES.items())}
NAMES |= {"mistral": "llama", "mixtral": "llama"}
"""The architecture in GGUF of each ``model_type``."""

Type = Callable[[str, np.ndarray], gguf.GGMLQuantizationType]


def floats(dtype: str) -> Type:
    """Matrices in float32, float16 or bfloat16; vectors in float32, as llama.cpp wants norms."""
    of_matrices = {
        "float32": gguf.GGMLQuantizationType.F32,
        "float16": gguf.GGMLQuantizationType.F16,
        "bfloat16": gguf.GGMLQuantizationType.BF16,
    }[dtype]
    return lambda name, x: of_matrices if x.ndim > 1 else gguf.GGMLQuantizationType.F32


def to_gguf(folder: Path, file: Path, dtype: str = "float32") -> None:
    """Write a checkpoint without its tokenizer: it is fed token ids."""
    lm = models.load(folder, dtype="float32")
    tensors = {name: np.asarray(x) for name, x in flatten(lm.params)}
    write_gguf(lm.config, tensors, file, floats(dtype))


def write_gguf(
    config: Config,
    tensors: Mapping[str, np.ndarray],
    file: Path,
    types: Type | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model of one of the families in ``NAMES``.

    Args:
      config: its configuration.
      tensors: its parameters in float32, by their names in kvjax.
      file: the file to write.
      types: the block type of a tensor, from its name in GGUF and its values; by default float32.
      metadata: more metadata, by key. By default there is no tokenizer.
    """
    if config.model_type not in NAMES:
        raise ValueError(f"no GGUF architecture is known for {config.model_type}")
    architecture = NAMES[config.model_type]
    writer = gguf.GGUFWriter(file, architecture)
    _write_shared(writer, config)
    _OWN.get(architecture, lambda writer, config: None)(writer, config)
    for key, value in (metadata or {"tokenizer.ggml.model": "none"}).items():
        _write_value(writer, key, value)
    code = {name: code for code, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(code, config.num_hidden_layers)
    named = _rope_tensors(config)
    for parameter, values in tensors.items():
        base, _, kind = parameter.rpartition(".")
        values = _converted(parameter, np.asarray(values, np.float32), config, architecture)
        named[f"{names.get_name(base)}.{kind}"] = values
    for name, values in named.items():
        dtype = (types or floats("float32"))(name, values)
        stored = gguf.quantize(np.ascontiguousarray(values), dtype)
        writer.add_tensor(name, stored, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_value(writer: Any, key: str, value: Any) -> None:
    write = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)]
    write(key, value)


def _write_shared(writer: Any, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    if config.model_type in ("cohere2", "gpt_neox"):
        writer.add_layer_norm_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope, parameters = config.rope, dict(config.rope.parameters)
    writer.add_rope_freq_base(rope.theta)
    writer.add_rope_dimension_count(rope.rotary_dim(config.head_dim))
    if rope.rope_type in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope.rope_type))
    if rope.rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_factor(parameters["factor"])
    if rope.rope_type in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if rope.rope_type == "longrope":
        scale = inverse_frequencies(config, 1)[1]
        writer.add_rope_scaling_attn_factors(scale)


def _gemma(writer: Any, config: Any) -> None:
    writer.add_sliding_window(next(window for window in config.windows if window))
    if config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def _cohere2(writer: Any, config: Any) -> None:
    writer.add_sliding_window(next(window for window in config.windows if window))
    writer.add_logit_scale(config.logit_scale)


def _phi3(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.windows[0] or 0)


def _neox(writer: Any, config: Any) -> None:
    writer.add_parallel_residual(config.parallel_residual)


def _experts(writer: Any, config: Any) -> None:
    if count := getattr(config, "num_experts", 0):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if config.model_type == "qwen3_moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)


_OWN: dict[str, Callable[[Any, Any], None]] = {
    "llama": _experts,
    "qwen3moe": _experts,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "cohere2": _cohere2,
    "phi3": _phi3,
    "gptneox": _neox,
}


def _rope_tensors(config: Any) -> dict[str, np.ndarray]:
    """The divisors of frequencies that GGUF stores as tensors."""
    if config.model_type == "gpt2":
        return {}
    parameters = dict(config.rope.parameters)
    if config.rope.rope_type == "longrope":
        return {
            f"rope_factors_{name}.weight": np.asarray(parameters[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    if config.rope.rope_type == "llama3":
        dim = config.rope.rotary_dim(config.head_dim)
        plain = config.rope.theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        scaled = inverse_frequencies(config, 1)[0].astype(np.float64)
        return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}
    return {}


def _converted(name: str, values: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    """Weights as llama.cpp wants them."""
    known = ARCHITECTURES[architecture]
    if known.interleaved and (".self_attn.q_proj." in name or ".self_attn.k_proj." in name):
        heads = config.num_attention_heads
        return _interleaved(values, heads if ".q_proj." in name else config.num_key_value_heads)
    if name.endswith("norm.weight"):
        return values + np.float32(known.norm_offset)
    if ".query_key_value." in name:
        heads = config.num_attention_heads
        parts = values.reshape(heads, 3, len(values) // heads // 3, *values.shape[1:])
        return parts.swapaxes(0, 1).reshape(values.shape)
    return values


def _interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a projection in GGUF's order: the two channels that rotate together are neighbors."""
    halves = x.reshape(heads, 2, len(x) // heads // 2, *x.shape[1:])
    return halves.swapaxes(1, 2).reshape(x.shape)
