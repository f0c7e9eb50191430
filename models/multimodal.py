"""The text part of a checkpoint that reads images, audio or video too.

Such a ``config.json`` keeps the text model's fields in ``text_config``, and its files hold the text
model's tensors under a prefix, beside those of the other parts. Here it becomes what a checkpoint
of the text model alone would be. Defaults are those of Transformers' configuration classes (5.23).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.core.reporting import readable_bytes

from .config_fields import read_dtype
from .json_fields import Fields, read_json
from .model_types import EVERYWHERE, FAMILIES, RELATIVES, check_model_type
from .stored import Stored, StoredTensor


@dataclass(frozen=True)
class _Whole:
    """What a multimodal model says of its text part where its file does not.

    ``text_type``: the text part's ``model_type``. ``tied``: the default of ``tie_word_embeddings``.
    ``either``: whether a true one of the text part counts beside a false one outside.
    ``missing``: the fields where there is no ``text_config``; ``flat``: then they stand outside.
    """

    text_type: str | None
    tied: bool = False
    either: bool = False
    missing: Mapping[str, Any] | None = None
    flat: bool = False


WHOLES = {
    "gemma3": _Whole("gemma3_text", tied=True),
    "gemma3n": _Whole("gemma3n_text", tied=True),
    "gemma4": _Whole("gemma4_text", tied=True),
    "gemma4_unified": _Whole("gemma4_unified_text", tied=True),
    "idefics3": _Whole("llama", missing={"rms_norm_eps": 1e-5}),
    "internvl": _Whole("qwen2", tied=True),
    "llama4": _Whole("llama4_text"),
    "llava": _Whole("llama", either=True),
    "llava_next": _Whole("llama"),
    "llava_onevision": _Whole("qwen2", either=True),
    "mistral3": _Whole(
        "mistral", tied=True,
        missing={
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
            "sliding_window": None, "vocab_size": 131072,
        },
    ),
    "qwen2_vl": _Whole("qwen2_vl_text", either=True, flat=True),
    "qwen2_5_vl": _Whole("qwen2_5_vl_text", either=True, flat=True),
    "qwen3_vl": _Whole("qwen3_vl_text"),
    "smolvlm": _Whole("llama", missing={"rms_norm_eps": 1e-5}),
    "vipllava": _Whole("llama"),
}  # fmt: skip
"""By ``model_type``. Any other is read too where ``text_config`` names a family that is read."""

_QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_window_layers": 80, "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_SAME_AS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified_text": (
        "gemma4_text",
        {
            "max_position_embeddings": 262144, "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "qwen2_vl_text": ("qwen2", _QWEN2_VL),
    "qwen2_5_vl_text": ("qwen2", _QWEN2_VL),
    "qwen3_vl_text": ("qwen3", {"max_position_embeddings": 128000, "rope_theta": 5e5}),
}  # fmt: skip
"""Text parts that compute what another family does, and the defaults that differ from its own."""

_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
_NOT_TEXT = "vision_", "image_", "video_"
"""How fields begin that stand beside those of text where there is no ``text_config``."""
TEXT_PREFIX = re.compile(r"^(model\.)?(language_model|text_model)\.")
"""Prefixes of the names of the text part's tensors."""
_PART = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|vision_embedder|visual|image_tower|video_tower|"
    r"audio_tower|multi_modal_projector|connector|image_newline|embed_vision|embed_audio)(\.|$)"
)


def _is_whole(values: Mapping[str, Any]) -> bool:
    name = values.get("model_type")
    if not isinstance(name, str) or name in FAMILIES or name in RELATIVES:
        return False
    return name in WHOLES or isinstance(values.get("text_config"), dict)


def is_read(config: Fields) -> bool:
    """Whether a ``config.json`` is of a family that is read, or has a text part that is."""
    name = (_text(config)[0] if _is_whole(config.values) else config).raw("model_type")
    return isinstance(name, str) and name in FAMILIES


def text_fields(config: Fields) -> Fields:
    """The fields of the text part as the config of a text model has them; of any other model, what
    was given.

    Raises:
      CheckpointError: if there is a text part, and it is not of a causal family that is read.
    """
    if not _is_whole(config.values):
        return config
    if config.raw("quantization_config"):
        raise config.wrong("quantization_config", EVERYWHERE["quantization_config"])
    if not config.values.get("is_causal", True):
        raise config.wrong("is_causal", EVERYWHERE["is_causal"])
    text, told = _text(config)
    if text.raw("model_type") == "t5":
        raise text.wrong("model_type", "a decoder alone: a text part with an encoder is not read")
    check_model_type(text)
    ids = {name: config.raw(name) for name in _IDS if config.raw(name) is not None}
    values = {**text.values, **ids}
    if dtype := read_dtype(config):
        values |= {"dtype": dtype}
    whole, outer = WHOLES.get(config.raw("model_type"), _Whole(None)), "tie_word_embeddings"
    tied = config.flag(outer, whole.tied or told.flag(outer, False))
    if tied or (not whole.either and (whole.text_type or config.raw(outer) is not None)):
        values[outer] = tied
    return Fields(config.file, values, text.parent)


def _text(config: Fields) -> tuple[Fields, Fields]:
    """The text part's fields under the name of the family that computes the same, and as told."""
    whole = WHOLES.get(config.raw("model_type"), _Whole(None))
    told = config.inner("text_config")
    if told is None and whole.flat:
        ropes = ("rope_scaling", "rope_parameters")
        flat = {k: v for k, v in config.values.items() if k in ropes or not isinstance(v, dict)}
        told = Fields(config.file, flat)
    told = told or Fields(config.file, whole.missing or {})
    name = told.raw("model_type", whole.text_type)
    if name == config.raw("model_type"):
        name = whole.text_type  # some files repeat the outer one
    values = {**told.values, "model_type": name}
    if isinstance(name, str) and name in _SAME_AS:
        name, defaults = _SAME_AS[name]
        values = {**defaults, **told.values, "model_type": name}
        for rope in ("rope_scaling", "rope_parameters"):
            if values.get(rope) and isinstance(values[rope], dict):
                values[rope] = _on_one_axis(values[rope])
    return Fields(config.file, values, told.parent), told


def _on_one_axis(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions of text. ``mrope`` turns each pair of channels by the token's time, row or
    column; a token of text has the same number for all three, its position, so that pairs turn as
    they do without it, by the same frequencies (Wang et al., arXiv:2409.12191, section 2.1)."""
    kept = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    if (rope.get("rope_type") or rope.get("type")) == "mrope":
        kept |= {"type": None, "rope_type": "default"}
    return kept


def read_text_fields(folder: Path) -> Fields:
    """``text_fields`` of a checkpoint's ``config.json``.

    Raises:
      CheckpointError: as ``text_fields`` does, or if the file can't be read.
    """
    file = folder / "config.json"
    return text_fields(Fields(file, read_json(file)))


def text_config(folder: Path) -> dict[str, Any]:
    """What ``config.json`` says, of a multimodal checkpoint as a text model's would say it."""
    values = read_json(folder / "config.json")
    fields = text_fields(Fields(folder / "config.json", values))
    if fields.values is values:
        return values
    kept = {k: v for k, v in fields.values.items() if not k.startswith(_NOT_TEXT)}
    words = str(kept["model_type"]).removesuffix("_text").split("_")
    return {**kept, "architectures": ["".join(map(str.capitalize, words)) + "ForCausalLM"]}


def other_part(name: str) -> str | None:
    """The part that a tensor of a multimodal checkpoint belongs to; None for the text part, and for
    a tensor of no known part."""
    found = None if TEXT_PREFIX.match(name) else _PART.match(name)
    return found and found[1]


def take_text(stored: Stored) -> tuple[Stored, dict[str, list[StoredTensor]]]:
    """The text part's tensors, and the others by part."""
    text = {name: tensor for name, tensor in stored.items() if not other_part(name)}
    others: dict[str, list[StoredTensor]] = {}
    for name, tensor in stored.items():
        if part := other_part(name):
            others.setdefault(part, []).append(tensor)
    return text, others


def skipped(others: Mapping[str, list[StoredTensor]]) -> str:
    """What was left out, in words: parts with their tensors and, where those were found, bytes."""
    words = []
    for part, tensors in sorted(others.items()):
        count = f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"
        found = all(tensor.dtype for tensor in tensors)
        size = f", {readable_bytes(sum(tensor.count for tensor in tensors))}" if found else ""
        words.append(f"{part} ({count}{size})")
    return ", ".join(words)
