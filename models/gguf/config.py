"""Convert the metadata of a GGUF file to the fields of a ``config.json``.

Every key of the model's architecture must be known: one that kvjax does not know could change the
model's output, so it is an error that names the key. What GGUF does not store (soft cap defaults,
patterns of sliding layers, scales of attention scores) follows llama.cpp, which has it in its code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError

from .file import GGUFFile, GGUFTensor, Value


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


class Metadata:
    """Reads the keys of one architecture, checks their types, and remembers which were read."""

    def __init__(self, file: GGUFFile):
        self.path, self.tensors, self._values = file.path, file.tensors, file.metadata
        self.architecture = self.text("general.architecture", None)
        self._read: set[str] = set()

    def wrong(self, key: str, expected: str) -> CheckpointError:
        value = self._values.get(key)
        shown = "missing" if value is None else f"{value!r:.200}"
        return CheckpointError(f"{self.path}: {key} is {shown}; expected {expected}")

    def text(self, key: str, default: str | None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def raw(self, name: str) -> Value | None:
        """The value of ``{architecture}.{name}``, or None if it is missing."""
        self._read.add(name)
        return self._values.get(f"{self.architecture}.{name}")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer, or an array of equal ones with an entry per layer."""
        value = self._scalar(name)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self.wrong(self.key(name), f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._scalar(name)
        value = default if value is None else value
        if not is_number(value) or value <= 0:
            raise self.wrong(self.key(name), "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool | None):
            raise self.wrong(self.key(name), "true or false")
        return default if value is None else value

    def _scalar(self, name: str) -> Value | None:
        value = self.raw(name)
        if not isinstance(value, np.ndarray):
            return value
        if value.size == 0 or (value != value[0]).any():
            raise self.wrong(self.key(name), "the same value in all layers")
        return value[0].item()

    def ignore(self, *names: str) -> None:
        """Mark keys as read that have no effect on the output of kvjax's model."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Raise an error for a key of the architecture that nothing has read."""
        prefix = f"{self.architecture}."
        for key in self._values:
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read:
                raise self.wrong(key, "a file without this key, which kvjax does not know")


@dataclass(frozen=True)
class GGUFArchitecture:
    """How an architecture of llama.cpp maps to a family of kvjax.

    Attributes:
      model_type: the family.
      norm: the family's name of the norms' epsilon in ``config.json``.
      interleaved: True if llama.cpp's converter reorders the rows of the query and key projections,
        so that the two channels which rotate together are neighbors.
      norm_offset: what the converter adds to the weights of norms.
      partial_rotary: whether a part of a head's channels may have no rotary positions.
      own: a function that adds the fields which only this architecture has.
      ignored: keys without effect on the text model.
    """

    model_type: str
    norm: str = "rms_norm_eps"
    interleaved: bool = False
    norm_offset: float = 0.0
    partial_rotary: bool = False
    own: Callable[[Metadata], Json] = lambda _: {}
    ignored: tuple[str, ...] = ()


def config_values(file: GGUFFile) -> tuple[Json, GGUFArchitecture]:
    """The fields of the ``config.json`` that a GGUF file stands for, and its architecture.

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
    meta.ignore("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", *architecture.ignored)
    meta.check_all_read()
    return values, architecture


def _shared(meta: Metadata, architecture: GGUFArchitecture) -> Json:
    heads = meta.integer("attention.head_count")
    hidden = meta.integer("embedding_length")
    head_dim = meta.integer("attention.key_length", max(hidden // heads, 1))
    if meta.integer("attention.value_length", head_dim) != head_dim:
        key = meta.key("attention.value_length")
        raise meta.wrong(key, f"{meta.key('attention.key_length')} = {head_dim}")
    context = meta.integer("context_length")
    epsilon = "attention.layer_norm_epsilon"
    if meta.raw(epsilon) is None:
        epsilon = "attention.layer_norm_rms_epsilon"
    if not meta.flag("attention.causal", True):
        raise meta.wrong(meta.key("attention.causal"), "true: attention is causal")
    embedding = meta.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{meta.path}: expected a matrix token_embd.weight")
    return {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": meta.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        architecture.norm: meta.number(epsilon),
        "tie_word_embeddings": "output.weight" not in meta.tensors,
        "dtype": stored_dtype(meta.tensors),
        "rope_parameters": _rope(meta, head_dim, context, architecture.partial_rotary),
    }


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
    rope: Json = {
        "rope_type": meta.raw("rope.scaling.type") or "default",
        "rope_theta": meta.number("rope.freq_base", 10000.0),
    }
    rotated = meta.integer("rope.dimension_count", head_dim)
    if rotated != head_dim and not partial:
        raise meta.wrong(meta.key("rope.dimension_count"), f"{head_dim}, the width of a head")
    rope["partial_rotary_factor"] = rotated / head_dim
    kind = meta.key("rope.scaling.type")
    if rope["rope_type"] in ("none", "default"):
        rope["rope_type"] = "default"
    elif rope["rope_type"] == "linear":
        rope["factor"] = meta.number("rope.scaling.factor")
    elif rope["rope_type"] == "yarn":
        rope |= _yarn(meta, context)
    elif rope["rope_type"] != "longrope":
        raise meta.wrong(kind, "none, linear, yarn or longrope")
    elif "rope_factors_long.weight" not in meta.tensors:
        raise meta.wrong(kind, "none, linear or yarn: there is no tensor rope_factors_long.weight")
    if (linear := meta.raw("rope.scale_linear")) is not None and linear != 1:
        rope |= {"rope_type": "linear", "factor": meta.number("rope.scale_linear")}
    trained = meta.integer("rope.scaling.original_context_length", context)
    return rope | _stored_factors(meta, trained)


def _yarn(meta: Metadata, context: int) -> Json:
    factor = meta.number("rope.scaling.factor")
    yarn: Json = {
        "factor": factor,
        "original_max_position_embeddings": meta.integer(
            "rope.scaling.original_context_length", context
        ),
    }
    if meta.raw("rope.scaling.attn_factor") is not None:
        scale = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        yarn["attention_factor"] = scale * meta.number("rope.scaling.attn_factor")
    for name in ("beta_fast", "beta_slow"):
        if meta.raw(f"rope.scaling.yarn_{name}") is not None:
            yarn[name] = meta.number(f"rope.scaling.yarn_{name}")
    return yarn


def _stored_factors(meta: Metadata, trained: int) -> Json:
    """Divisors of the frequencies that the file stores as tensors: of Llama 3, the same for every
    length; of LongRoPE, two sets."""
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    if (one := meta.tensors.get("rope_freqs.weight")) is not None:
        stretch = _numbers(one)
        # LongRoPE with equal factors for short and long sequences divides frequencies the same way.
        found = {"short_factor": stretch, "long_factor": stretch, "attention_factor": 1.0}
    elif all(name in meta.tensors for name in names):
        short, long = (_numbers(meta.tensors[name]) for name in names)
        found: Json = {"short_factor": short, "long_factor": long}
        if meta.raw("rope.scaling.attn_factor") is not None:
            found["attention_factor"] = meta.number("rope.scaling.attn_factor")
        meta.ignore("rope.scaling.factor")
    else:
        return {}
    return {"rope_type": "longrope", "original_max_position_embeddings": trained, **found}


def _numbers(tensor: GGUFTensor) -> list[float]:
    return [float(x) for x in tensor.read().reshape(-1)]


def _llama(meta: Metadata) -> Json:
    values: Json = {
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in meta.tensors,
    }
    experts = meta.integer("expert_count", 0, least=0)
    choices = meta.integer("expert_used_count", 0, least=0)
    if experts:
        values |= {"model_type": "mixtral", "num_local_experts": experts}
        values |= {"num_experts_per_tok": choices, "sliding_window": None}
    return values


def _qwen3moe(meta: Metadata) -> Json:
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
    if meta.raw("attention.scale") is not None:
        return {"query_pre_attn_scalar": meta.number("attention.scale") ** -2}
    return {"query_pre_attn_scalar": width}


def _gemma2(meta: Metadata) -> Json:
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
    if meta.raw("rope.freq_base") is None:
        full["rope_theta"] = 1e6
    values: Json = {
        "sliding_window": meta.integer("attention.sliding_window", 1024),
        "sliding_window_pattern": meta.integer("attention.sliding_window_pattern", 6),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        **_gemma_scale(meta, largest=62),
    }
    if meta.raw("final_logit_softcapping") is not None:
        values["final_logit_softcapping"] = meta.number("final_logit_softcapping")
    return values


def _phi3(meta: Metadata) -> Json:
    # 0 means no window.
    window = meta.integer("attention.sliding_window", 0, least=0)
    trained = meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
    return {"sliding_window": window or None, "original_max_position_embeddings": trained}


def _cohere2(meta: Metadata) -> Json:
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
    "qwen2": GGUFArchitecture("qwen2"),
    "qwen2vl": GGUFArchitecture("qwen2", ignored=_SECTIONS),
    "qwen3": GGUFArchitecture("qwen3"),
    "qwen3vl": GGUFArchitecture("qwen3", ignored=(*_SECTIONS, "n_deepstack_layers")),
    "qwen3moe": GGUFArchitecture("qwen3_moe", own=_qwen3moe),
    "gemma2": GGUFArchitecture("gemma2", norm_offset=1.0, own=_gemma2),
    "gemma3": GGUFArchitecture("gemma3_text", norm_offset=1.0, own=_gemma3),
    "phi3": GGUFArchitecture("phi3", partial_rotary=True, own=_phi3),
    "olmo2": GGUFArchitecture("olmo2"),
    "smollm3": GGUFArchitecture("smollm3", interleaved=True),
    "cohere2": GGUFArchitecture("cohere2", norm="layer_norm_eps", own=_cohere2),
    "gptneox": GGUFArchitecture("gpt_neox", norm="layer_norm_eps", partial_rotary=True, own=_neox),
    "gpt2": GGUFArchitecture("gpt2", norm="layer_norm_epsilon", own=_gpt2),
}
"""The supported architectures, by ``general.architecture``."""
