"""Extraction of the text model from a multimodal checkpoint.

A multimodal ``config.json`` keeps the text model's fields in ``text_config``, and the weight files
store the text model's tensors under a prefix, together with the vision and audio tensors. This
module converts both to the form of a text-only checkpoint. Defaults match Transformers'
configuration classes (5.23).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvjax.core.reporting import readable_bytes
from kvjax.core.typing import Json

from .config_fields import EVERYWHERE, FAMILIES, RELATIVES, check_model_type, read_dtype
from .files import Fields, Stored, StoredTensor, read_json


@dataclass(frozen=True)
class _MultimodalDefaults:
    """Defaults of a multimodal model for its text model.

    Attributes:
      text_type: the text model's ``model_type``.
      tied: the default of the outer ``tie_word_embeddings``.
      either: whether embeddings are tied if either ``text_config`` or the outer config says so.
      missing: the text model's fields if ``text_config`` is missing.
      flat: whether the text model's fields may be at the top level instead of in ``text_config``.
    """

    text_type: str | None
    tied: bool = False
    either: bool = False
    missing: Mapping[str, object] | None = None
    flat: bool = False


MULTIMODAL = {
    # Transformers' classes for these two models omit the text model's logit_scale. kvjax applies
    # it, as in the text model from which they were trained.
    "aya_vision": _MultimodalDefaults("cohere2", tied=True),
    "cohere2_vision": _MultimodalDefaults("cohere2", tied=True),
    "gemma3": _MultimodalDefaults("gemma3_text", tied=True),
    "gemma3n": _MultimodalDefaults("gemma3n_text", tied=True),
    "gemma4": _MultimodalDefaults("gemma4_text", tied=True),
    "gemma4_unified": _MultimodalDefaults("gemma4_unified_text", tied=True),
    "idefics3": _MultimodalDefaults("llama", missing={"rms_norm_eps": 1e-5}),
    "internvl": _MultimodalDefaults("qwen2", tied=True),
    "llama4": _MultimodalDefaults("llama4_text"),
    "llava": _MultimodalDefaults("llama", either=True),
    "llava_next": _MultimodalDefaults("llama"),
    "llava_onevision": _MultimodalDefaults("qwen2", either=True),
    "mistral3": _MultimodalDefaults(
        "mistral", tied=True,
        missing={
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e9,
            "sliding_window": None, "vocab_size": 131072,
        },
    ),
    "qwen2_vl": _MultimodalDefaults("qwen2_vl_text", either=True, flat=True),
    "qwen2_5_vl": _MultimodalDefaults("qwen2_5_vl_text", either=True, flat=True),
    "qwen3_vl": _MultimodalDefaults("qwen3_vl_text"),
    "smolvlm": _MultimodalDefaults("llama", missing={"rms_norm_eps": 1e-5}),
    "vipllava": _MultimodalDefaults("llama"),
}  # fmt: skip
"""Multimodal models by ``model_type``. A model not listed here is read too if its ``text_config``
names a supported family."""

_QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "max_window_layers": 80, "rope_theta": 1e6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_SAME_AS: dict[str, tuple[str, Json]] = {
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
"""Text models that are identical to another family, each with this family and the defaults that
differ."""

_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
_NOT_TEXT = "vision_", "image_", "video_"
"""Prefixes of top-level fields that do not belong to the text model."""
TEXT_PREFIX = re.compile(r"^(model\.)?(language_model|text_model)\.")
"""Prefix of the text model's tensor names."""
_PART = re.compile(
    r"^(?:model\.)?(vision_tower|vision_model|vision_embedder|visual|image_tower|video_tower|"
    r"audio_tower|multi_modal_projector|connector|image_newline|embed_vision|embed_audio)(\.|$)"
)


def _is_multimodal(values: Mapping[str, object]) -> bool:
    name = values.get("model_type")
    if not isinstance(name, str) or name in FAMILIES or name in RELATIVES:
        return False
    return name in MULTIMODAL or isinstance(values.get("text_config"), dict)


def is_read(config: Fields) -> bool:
    """Return whether kvjax supports the model of a ``config.json``, or its text model."""
    name = (_text(config)[0] if _is_multimodal(config.values) else config).raw("model_type")
    return isinstance(name, str) and name in FAMILIES


def text_fields(config: Fields) -> Fields:
    """Return the text model's fields, in the form of a text-only config.

    A config that is not multimodal is returned unchanged.

    Raises:
      CheckpointError: if the text model is not of a supported causal family.
    """
    if not _is_multimodal(config.values):
        return config
    if config.raw("quantization_config"):
        raise config.wrong("quantization_config", EVERYWHERE["quantization_config"])
    if not config.values.get("is_causal", True):
        raise config.wrong("is_causal", EVERYWHERE["is_causal"])
    text, raw_text = _text(config)
    if text.raw("model_type") == "t5":
        raise text.wrong(
            "model_type", "a decoder-only model: a text model with an encoder is not supported"
        )
    check_model_type(text)
    ids = {name: config.raw(name) for name in _IDS if config.raw(name) is not None}
    values = {**text.values, **ids}
    if dtype := read_dtype(config):
        values |= {"dtype": dtype}
    model = MULTIMODAL.get(config.raw("model_type"), _MultimodalDefaults(None))
    outer = "tie_word_embeddings"
    tied = config.flag(outer, model.tied or raw_text.flag(outer, False))
    if tied or (not model.either and (model.text_type or config.raw(outer) is not None)):
        values[outer] = tied
    return Fields(config.file, values, text.parent)


def _text(config: Fields) -> tuple[Fields, Fields]:
    """Return the text model's fields in two forms: with ``model_type`` mapped to a supported
    family, and as they are in the file."""
    model = MULTIMODAL.get(config.raw("model_type"), _MultimodalDefaults(None))
    raw_text = config.inner("text_config")
    if raw_text is None and model.flat:
        ropes = ("rope_scaling", "rope_parameters")
        flat = {k: v for k, v in config.values.items() if k in ropes or not isinstance(v, dict)}
        raw_text = Fields(config.file, flat)
    raw_text = raw_text or Fields(config.file, model.missing or {})
    name = raw_text.raw("model_type", model.text_type)
    if name == config.raw("model_type"):
        name = model.text_type  # some files repeat the outer model_type
    values = {**raw_text.values, "model_type": name}
    if isinstance(name, str) and name in _SAME_AS:
        name, defaults = _SAME_AS[name]
        values = {**defaults, **raw_text.values, "model_type": name}
        for rope in ("rope_scaling", "rope_parameters"):
            if values.get(rope) and isinstance(values[rope], dict):
                values[rope] = _on_one_axis(values[rope])
    return Fields(config.file, values, raw_text.parent), raw_text


def _on_one_axis(rope: Json) -> Json:
    """Replace ``mrope`` by the equivalent rotary positions for text.

    ``mrope`` rotates each pair of channels by the token's time, row or column. For a text token,
    all three are equal to its position, so the rotation is the same as without ``mrope`` (Wang et
    al., arXiv:2409.12191, section 2.1).
    """
    kept = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved")}
    if (rope.get("rope_type") or rope.get("type")) == "mrope":
        kept |= {"type": None, "rope_type": "default"}
    return kept


def read_text_fields(folder: Path) -> Fields:
    """Read a checkpoint's ``config.json`` and apply ``text_fields``.

    Raises:
      CheckpointError: if ``text_fields`` raises it, or if the file can't be read.
    """
    file = folder / "config.json"
    return text_fields(Fields(file, read_json(file)))


def text_config(folder: Path) -> Json:
    """Return the content of ``config.json``. For a multimodal checkpoint, it is converted to
    text-only form."""
    values = read_json(folder / "config.json")
    fields = text_fields(Fields(folder / "config.json", values))
    if fields.values is values:
        return values
    kept = {k: v for k, v in fields.values.items() if not k.startswith(_NOT_TEXT)}
    words = str(kept["model_type"]).removesuffix("_text").split("_")
    return {**kept, "architectures": ["".join(map(str.capitalize, words)) + "ForCausalLM"]}


def other_part(name: str) -> str | None:
    """Return the vision, audio or connector module to which a tensor belongs; None for the text
    model and for unknown tensors."""
    match = None if TEXT_PREFIX.match(name) else _PART.match(name)
    return match and match[1]


def take_text(stored: Stored) -> tuple[Stored, dict[str, list[StoredTensor]]]:
    """Split tensors into the text model's tensors, and all others, grouped by module."""
    text = {name: tensor for name, tensor in stored.items() if not other_part(name)}
    others: dict[str, list[StoredTensor]] = {}
    for name, tensor in stored.items():
        if part := other_part(name):
            others.setdefault(part, []).append(tensor)
    return text, others


def skipped(others: Mapping[str, list[StoredTensor]]) -> str:
    """Describe the skipped modules: the number of their tensors, and their size if it is known."""
    words = []
    for part, tensors in sorted(others.items()):
        count = f"{len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"
        known = all(tensor.dtype for tensor in tensors)
        size = f", {readable_bytes(sum(tensor.count for tensor in tensors))}" if known else ""
        words.append(f"{part} ({count}{size})")
    return ", ".join(words)
