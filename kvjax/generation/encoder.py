"""Encoders: each text is encoded once, and the decoder attends to a cache of the output."""

import functools
from dataclasses import replace
from typing import Any

import jax
from jaxtyping import PyTree

from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache
from kvjax.core.typing import PerRow, Tokens
from kvjax.generation.model import capacity_bucket
from kvjax.layouts import Dense
from kvjax.memory.sizes import LoadedModel, device_bytes, has_encoder
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import Auto, PolicyChoice, per_layer, policy

SOURCE = "source"
"""The key of the encoder's cache among the parameters."""
NOT_ENCODED = "this model's encoder has read no text: call lm.with_encoder_inputs(texts) first"


def has_encoded(lm: object) -> bool:
    """Return whether the model has an encoder that has already read texts."""
    return has_encoder(lm) and SOURCE in getattr(lm, "params", {})


def without_source(params: dict[str, PyTree]) -> dict[str, PyTree]:
    """Return the parameters without the encoder's cache."""
    return {name: node for name, node in params.items() if name != SOURCE}


def refuse_encoder(what: str, lm: object) -> None:
    """Raise ``ValueError`` for a model with an encoder, which ``what`` does not support."""
    if has_encoder(lm):
        raise ValueError(f"{what} does not support models with an encoder")


def check_encoded(lm: object) -> None:
    """Raise ``ValueError`` for a model with an encoder that has read no text."""
    if has_encoder(lm) and not has_encoded(lm):
        raise ValueError(NOT_ENCODED)


def refuse_auto(choice: object) -> None:
    """Raise ``ValueError`` for the policy ``Auto``."""
    if isinstance(choice, Auto) or (isinstance(choice, str) and isinstance(policy(choice), Auto)):
        raise ValueError(
            "policy('auto') moves layers as a sequence grows, but the encoder's cache is filled at "
            "once: give a policy for the device or the host"
        )


def source_bytes(
    lm: LoadedModel, choice: PolicyChoice | None, texts: list[list[int]], rows: int
) -> int:
    """Return the bytes of device memory of the encoder's cache for these texts in ``rows`` rows."""
    policies, width = _policies(lm, choice), capacity_bucket(max(map(len, texts)))
    return device_bytes(lm.config, policies, rows, width, lm.mesh)


def _policies(lm: LoadedModel, choice: PolicyChoice | None) -> list[CachePolicy]:
    """Return the policies of the encoder's cache. They are dense, because all tokens are appended
    in one call."""
    choice = "static" if choice is None else choice
    return [replace(each, layout=Dense()) for each in per_layer(choice, lm.config)]


def encode_source(lm: Any, tokens: Tokens, lengths: PerRow, choice: PolicyChoice) -> KVCache:
    """Run a model's encoder over texts, and return the cache for cross-attention.

    Args:
      lm: a model with an encoder.
      tokens: int32[batch, new], right-padded.
      lengths: int32[batch], the number of real tokens per row.
      choice: a policy. Its codecs and placements are used, but not its layout.
    """
    rows, width = tokens.shape
    source = init_cache(lm.config, _policies(lm, choice), batch=rows, max_len=width, mesh=lm.mesh)
    return _encode(lm.architecture, lm.params, tokens, lengths, source)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="source")
def _encode(
    model: Any, params: PyTree, tokens: Tokens, lengths: PerRow, source: KVCache
) -> KVCache:
    filled: KVCache = model.read(params, tokens, lengths, source)
    return filled
