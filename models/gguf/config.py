"""Convert the metadata of a GGUF file to the fields of a ``config.json``.

kvjax must know every key of the model's architecture. An unknown key could change the model's
output, so it raises an error that names the key. Values that GGUF does not store (soft cap
defaults, patterns of sliding layers, scales of attention scores) are those in llama.cpp's code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError

from .file import GGUFFile, GGUFTensor
from .metadata import Metadata


@dataclass(frozen=True)
class GGUFArchitecture:
    """How an architecture of llama.cpp maps to a family of kvjax.

    Attributes:
      model_type: the family.
      norm: the name of the norms' epsilon in the family's ``config.json``.
      interleaved: True if llama.cpp's converter reorders the rows of the query and key projections,
        so that the two channels which rotate together are neighbors.
      norm_offset: what the converter adds to the weights of norms.
      rotary: whether the model has rotary positions.
      partial_rotary: whether a part of a head's channels may have no rotary positions.
      own: a function that adds the fields which only this architecture has.
      ignored: keys without effect on the text model.
    """

    model_type: str
    norm: str = "rms_norm_eps"
    interleaved: bool = False
    norm_offset: float = 0.0
    rotary: bool = True
    partial_rotary: bool = False
    own: Callable[[Metadata], Json] = lambda _: {}
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class GGUFConfig:
    """What the metadata of a file says.

    ``values``: the fields of a ``config.json``. ``read_tensors``: names of the tensors from which
    values were read. These tensors are not parameters.
    """

    values: Json
    architecture: GGUFArchitecture
    read_tensors: frozenset[str]


def config_values(file: GGUFFile) -> GGUFConfig:
    """Return the ``config.json`` fields that correspond to a GGUF file's metadata, and the file's
    architecture.

    Raises:
      CheckpointError: if the file is not of a supported architecture, or a key is missing, unknown
        or invalid. The message names the key, its value, and what was expected.
    """
    meta = Metadata(file)
    if meta.text("general.type", "model") != "model":
        raise meta.wrong("general.type", "model: adapters and vision parts are not models")
    architecture = ARCHITECTURES.get(meta.architecture)
    if architecture is None:
        raise meta.wrong("general.architecture", f"one of {', '.join(sorted(ARCHITECTURES))}")
    values = _shared(meta, architecture)
    values |= architecture.own(meta)
    meta.ignore(
        "vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "pooling_type",
        *architecture.ignored,
    )  # fmt: skip
    meta.check_all_read()
    return GGUFConfig(values, architecture, frozenset(meta.read_tensors))


def _shared(meta: Metadata, architecture: GGUFArchitecture) -> Json:
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", max(hidden // heads, 1))
    if meta.integer("attention.value_length", head_dim) != head_dim:
        key = meta.key("attention.value_length")
        raise meta.wrong(key, f"{meta.key('attention.key_length')} = {head_dim}")
    context = meta.integer("context_length")
    layers = _layers(meta)
    # A converter may write both, and the family uses one.
    epsilons = ["attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"]
    if architecture.norm == "rms_norm_eps":
        epsilons.reverse()
    epsilon = epsilons[0] if meta.raw(epsilons[0]) is not None else epsilons[1]
    meta.ignore(*epsilons)
    if not meta.flag("attention.causal", True):
        raise meta.wrong(meta.key("attention.causal"), "true: attention is causal")
    embedding = meta.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{meta.path}: expected a matrix token_embd.weight")
    rope: Json = {}
    if architecture.rotary:
        rope = {"rope_parameters": _rope(meta, head_dim, context, architecture.partial_rotary)}
    return {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        architecture.norm: meta.number(epsilon),
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "dtype": stored_dtype(meta.tensors),
        **rope,
    }


def _layers(meta: Metadata) -> int:
    """The number of layers, each of which has tensors."""
    layers = meta.integer("block_count")
    if not any(name.startswith(f"blk.{layers - 1}.") for name in meta.tensors):
        raise meta.wrong(meta.key("block_count"), "the number of layers that have tensors")
    return layers


def stored_dtype(tensors: Mapping[str, GGUFTensor]) -> str:
    """The float dtype with the largest share of the bytes. Quantized types count as bfloat16."""
    sizes: dict[str, int] = {}
    floats = {"F32": "float32", "F64": "float32", "F16": "float16"}
    for tensor in tensors.values():
        dtype = floats.get(tensor.dtype, "bfloat16")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.count
    return max(sizes, key=lambda dtype: sizes[dtype])


def _rope(meta: Metadata, head_dim: int, context: int, partial: bool) -> Json:
    """Rotary positions as ``rope_parameters``. ``partial``: whether the family can rotate a part of
    the channels."""
    rotated = meta.integer("rope.dimension_count", head_dim)
    if rotated % 2 or rotated > head_dim or (rotated != head_dim and not partial):
        expected = f"an even number up to {head_dim}" if partial else f"{head_dim}"
        raise meta.wrong(meta.key("rope.dimension_count"), f"{expected}, the width of a head")
    part = rotated / head_dim
    if int(head_dim * part) != rotated:  # as the families compute it
        part = math.nextafter(part, math.inf)
    rope: Json = {
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": part,
    }
    factor = meta.raw("rope.scaling.factor")
    kind, key = meta.option("rope.scaling.type", ""), meta.key("rope.scaling.type")
    if kind == "":
        kind = "none" if factor is None else "linear"
    if meta.raw("rope.scale_linear") is not None and kind == "none":
        kind = "linear" if meta.number("rope.scale_linear") != 1 else "none"
    if kind == "none":
        rope["rope_type"] = "default"
    elif kind == "linear":
        name = "rope.scaling.factor" if factor is not None else "rope.scale_linear"
        rope |= {"rope_type": "linear", "factor": meta.number(name)}
    elif kind == "yarn":
        rope |= _yarn(meta, context)
    elif kind != "longrope":
        raise meta.wrong(key, "none, linear, yarn or longrope")
    factors = _stored_factors(meta, rotated // 2, context)
    if factors and kind not in ("none", "longrope"):
        raise meta.wrong(key, "none or longrope: the file has factors of frequencies as tensors")
    if kind == "longrope" and not factors:
        raise meta.wrong(
            key, "none, linear or yarn: the file has no tensor rope_factors_long.weight"
        )
    return rope | factors


def _yarn(meta: Metadata, context: int) -> Json:
    factor = meta.number("rope.scaling.factor")
    yarn: Json = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.integer(
            "rope.scaling.original_context_length", context
        ),
    }
    if meta.raw("rope.scaling.yarn_attn_factor") is not None:
        yarn["attention_factor"] = meta.number("rope.scaling.yarn_attn_factor")
    elif meta.raw("rope.scaling.attn_factor") is not None:
        scale = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        yarn["attention_factor"] = scale * meta.number("rope.scaling.attn_factor")
    meta.ignore("rope.scaling.attn_factor")
    meta.only("rope.scaling.yarn_ext_factor", 1.0)
    for name in ("beta_fast", "beta_slow"):
        if meta.raw(f"rope.scaling.yarn_{name}") is not None:
            yarn[name] = meta.number(f"rope.scaling.yarn_{name}")
    return yarn


def _stored_factors(meta: Metadata, count: int, context: int) -> Json:
    """Read the divisors of the ``count`` frequencies that some files store as tensors: one set for
    Llama 3, two sets for LongRoPE. Empty without such tensors."""
    trained = meta.integer("rope.scaling.original_context_length", context)
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if "rope_freqs.weight" in meta.tensors:
        stretch = _factors(meta, "rope_freqs.weight", count)
        # LongRoPE with equal factors for short and long sequences divides frequencies the same way.
        found: Json = {"short_factor": stretch, "long_factor": stretch, "attention_factor": 1.0}
    elif all(name in meta.tensors for name in names):
        short, long = (_factors(meta, name, count) for name in names)
        scale = meta.number("rope.scaling.attn_factor", 1.0)
        found = {"short_factor": short, "long_factor": long, "attention_factor": scale}
    else:
        return {}
    return {"rope_type": "longrope", "original_max_position_embeddings": trained, **found}


def _factors(meta: Metadata, name: str, count: int) -> list[float]:
    tensor = meta.tensors[name]
    if tensor.shape != (count,):
        raise CheckpointError(
            f"{meta.path}: the tensor {name} has the shape {list(tensor.shape)}; expected {[count]}"
        )
    meta.read_tensors.add(name)
    values = [float(x) for x in tensor.read()]
    if not all(math.isfinite(x) and x > 0 for x in values):
        raise CheckpointError(f"{meta.path}: the tensor {name} has numbers that are not above 0")
    return values


def _llama(meta: Metadata) -> Json:
    biases = "blk.0.attn_q.bias" in meta.tensors
    values: Json = {
        "attention_bias": biases,
        "mlp_bias": "blk.0.ffn_down.bias" in meta.tensors,
    }
    if biases and "blk.0.attn_output.bias" not in meta.tensors:
        values["model_type"] = "qwen2"  # the same, with biases of queries, keys and values only
    if experts := meta.integer("expert_count", 0, least=0):
        values |= {"model_type": "mixtral", "num_local_experts": experts, "sliding_window": None}
        values["num_experts_per_tok"] = meta.integer("expert_used_count")
    meta.ignore("expert_used_count")
    meta.only("expert_gating_func", 1)  # softmax
    return values


def _mistral(meta: Metadata) -> Json:
    return {"sliding_window": None}


def _qwen3moe(meta: Metadata) -> Json:
    meta.only("expert_shared_feed_forward_length", 0)
    meta.only("expert_gating_func", 1)
    return {
        "num_experts": meta.integer("expert_count"),
        "num_experts_per_tok": meta.integer("expert_used_count"),
        "moe_intermediate_size": meta.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _gemma_scale(meta: Metadata, largest: int) -> Json:
    """Scores are divided by the root of the head's width, except in the model with the most layers,
    where it is the root of the hidden size per head."""
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    width = meta.integer("attention.key_length", hidden // heads)
    if meta.integer("block_count") == largest:
        width = hidden // heads
    if meta.raw("attention.scale") is None:
        return {"query_pre_attn_scalar": width}
    scale = meta.number("attention.scale")
    if not 1e-9 < scale < 1e9:
        raise meta.wrong(meta.key("attention.scale"), "a number from 1e-9 to 1e9")
    return {"query_pre_attn_scalar": scale**-2}


def _gemma2(meta: Metadata) -> Json:
    meta.only("attention.sliding_window_pattern", 2)
    return {
        "sliding_window": meta.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        **_gemma_scale(meta, largest=46),
    }


def _gemma3(meta: Metadata) -> Json:
    heads, hidden = meta.integer("attention.head_count"), meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    local = {"rope_type": "default", "rope_theta": meta.number("rope.freq_base_swa", 10000.0)}
    full = _rope(meta, head_dim, meta.integer("context_length"), partial=False)
    values: Json = {
        **_gemma3_windows(meta),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **_gemma_scale(meta, largest=62),
    }
    if meta.raw("final_logit_softcapping") is not None:
        values["final_logit_softcapping"] = meta.number("final_logit_softcapping")
    return values


def _gemma3_windows(meta: Metadata) -> Json:
    """The window, and which layers have it. Without a window, all layers have full attention."""
    layers = meta.integer("block_count")
    window = meta.integer("attention.sliding_window", 0, least=0)
    pattern = meta.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == layers:
        sliding = pattern.tolist()
    else:
        every = meta.integer("attention.sliding_window_pattern", 6)
        sliding = [(layer + 1) % every != 0 for layer in range(layers)]
    names = ("full_attention", "sliding_attention")
    kinds = [names[each and window > 0] for each in sliding]
    return {"sliding_window": window or None, "layer_types": kinds}


def _phi3(meta: Metadata) -> Json:
    # As in Transformers; llama.cpp ignores the window. 0 means none.
    window = meta.integer("attention.sliding_window", 0, least=0)
    trained = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def _cohere2(meta: Metadata) -> Json:
    meta.only("attention.sliding_window_pattern", 4)
    return {
        "sliding_window": meta.integer("attention.sliding_window"),
        "sliding_window_pattern": 4,
        "logit_scale": meta.number("logit_scale"),
    }


def _neox(meta: Metadata) -> Json:
    return {
        "use_parallel_residual": meta.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in meta.tensors,
        "tie_word_embeddings": False,
    }


def _gpt2(meta: Metadata) -> Json:
    return {"n_inner": meta.integer("feed_forward_length")}


_SECTIONS = ("rope.dimension_sections",)  # of multimodal rotary positions, equal for text

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture("llama", interleaved=True, own=_llama),
    "mistral3": GGUFArchitecture("mistral", interleaved=True, own=_mistral),
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen2vl": GGUFArchitecture("qwen2", ignored=_SECTIONS),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3vl": GGUFArchitecture("qwen3", ignored=(*_SECTIONS, "n_deepstack_layers")),
    "qwen3moe": GGUFArchitecture("qwen3_moe", own=_qwen3moe),
    "qwen3vlmoe": GGUFArchitecture(
        "qwen3_moe", own=_qwen3moe, ignored=(*_SECTIONS, "n_deepstack_layers")
    ),
    "gemma2": GGUFArchitecture("gemma2", norm_offset=1.0, own=_gemma2),
    "gemma3": GGUFArchitecture("gemma3_text", norm_offset=1.0, own=_gemma3),
    "phi3": GGUFArchitecture("phi3", partial_rotary=True, own=_phi3),
    "olmo2": GGUFArchitecture("olmo2"),
    "smollm3": GGUFArchitecture("smollm3", interleaved=True),
    "cohere2": GGUFArchitecture("cohere2", norm="layer_norm_eps", own=_cohere2),
    "gptneox": GGUFArchitecture("gpt_neox", norm="layer_norm_eps", partial_rotary=True, own=_neox),
    "gpt2": GGUFArchitecture("gpt2", norm="layer_norm_epsilon", rotary=False, own=_gpt2),
}
"""The supported architectures, by ``general.architecture``."""
