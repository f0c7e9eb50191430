"""Read the end tokens and sampling parameters of a GGUF file."""

import math

import numpy as np

from kvjax.core.validation import CheckpointError
from kvjax.generation.model import GenerationDefaults

from .file import GGUFFile, shown
from .metadata import is_number

_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TOKENS = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>",
    "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|call|>", "<end_of_utterance>",
    "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "</s>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Control tokens that end a message. Files often name only one of them; llama.cpp, too, finds the
others by their texts."""
_CONTROL = 3
_SAMPLING = {
    "temp": ("temperature", math.inf),
    "top_k": ("top_k", math.inf),
    "top_p": ("top_p", 1.0),
    "min_p": ("min_p", 1.0),
    "penalty_repeat": ("repetition_penalty", math.inf),
}
"""The parameter of each key, and its largest value."""


def read_generation(file: GGUFFile) -> GenerationDefaults:
    """The end tokens and sampling parameters of a file.

    Raises:
      CheckpointError: if a value has the wrong type.
    """
    metadata = file.metadata
    sampling = {
        name: _number(file, f"general.sampling.{key}", most)
        for key, (name, most) in _SAMPLING.items()
        if f"general.sampling.{key}" in metadata
    }
    temperature = sampling.get("temperature")
    return GenerationDefaults(
        eos_token_ids=_end_tokens(file),
        bos_token_id=_token(file, "bos_token_id"),
        pad_token_id=_token(file, "padding_token_id"),
        do_sample=None if temperature is None else temperature > 0,
        temperature=temperature,
        top_k=None if "top_k" not in sampling else int(sampling["top_k"]),
        top_p=sampling.get("top_p"),
        min_p=sampling.get("min_p"),
        repetition_penalty=sampling.get("repetition_penalty"),
    )


def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """The token ids that end a text, those named by the file first."""
    named = [_token(file, name) for name in _END_IDS]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    types = file.metadata.get("tokenizer.ggml.token_type")
    found = []
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        control = {tokens[n]: int(n) for n in np.flatnonzero(types == _CONTROL)}
        found = [control[text] for text in _END_TOKENS if text in control]
    return tuple(dict.fromkeys(n for n in (*named, *found) if n is not None))


def _token(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = file.metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or value < -1:
        raise CheckpointError(f"{file.path}: {key} is {shown(value)}; expected a token id")
    return None if value in (-1, 2**32 - 1) else value  # some files use these for no token


def _number(file: GGUFFile, key: str, most: float) -> float:
    value = file.metadata[key]
    if not is_number(value) or not 0 <= value <= most:
        limit = "of at least 0" if most == math.inf else f"from 0 to {most:g}"
        raise CheckpointError(f"{file.path}: {key} is {shown(value)}; expected a number {limit}")
    if key.endswith("top_k") and value != int(value):
        raise CheckpointError(f"{file.path}: {key} is {shown(value)}; expected an integer")
    return value
