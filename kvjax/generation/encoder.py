"""Run an encoder once per text, into a cache that the decoder attends to."""

import functools
from dataclasses import replace
from typing import Any

import jax

from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache
from kvjax.core.typing import PerRow, Tokens
from kvjax.generation.capacity import capacity_bucket
from kvjax.layouts import Dense
from kvjax.memory.sizes import device_bytes, has_encoder
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import Auto, PolicyChoice, per_layer, policy

SOURCE = "source"
"""The key of that cache, beside a model's parameters."""
NOT_ENCODED = "this model's encoder has read no text: lm.reading(texts) lets it"


def has_encoded(lm: Any) -> bool:
    """Whether it has, and that has read what its rows go by."""
    return has_encoder(lm) and SOURCE in getattr(lm, "params", {})


def without_source(params: dict[str, Any]) -> dict[str, Any]:
    """A model's parameters alone."""
    return {name: node for name, node in params.items() if name != SOURCE}


def refuse_encoder(what: str, lm: Any) -> None:
    """Raise ``ValueError`` for a model with an encoder, of which there is no ``what``."""
    if has_encoder(lm):
        raise ValueError(
            f"{what} is of models without an encoder: what one reads has no place in it"
        )


def check_encoded(lm: Any) -> None:
    """Raise ``ValueError`` for a model whose encoder has read nothing."""
    if has_encoder(lm) and not has_encoded(lm):
        raise ValueError(NOT_ENCODED)


def refuse_auto(choice: Any) -> None:
    """Raise ``ValueError`` for a policy that keeps to a memory."""
    if isinstance(choice, Auto) or (isinstance(choice, str) and isinstance(policy(choice), Auto)):
        raise ValueError(
            "policy('auto') moves layers as a text grows, and what an encoder has read is there at "
            "once: give a policy of the device or of the host"
        )


def source_bytes(lm: Any, choice: PolicyChoice | None, texts: list[list[int]], rows: int) -> int:
    """Bytes of the device that texts will take once they are read, in so many rows."""
    policies, width = _policies(lm, choice), capacity_bucket(max(map(len, texts)))
    return device_bytes(lm.config, policies, rows, width, lm.mesh)


def _policies(lm: Any, choice: PolicyChoice | None) -> list[CachePolicy]:
    """Of a text that is read at once no token is the newest, so the layout is dense."""
    choice = "static" if choice is None else choice
    return [replace(each, layout=Dense()) for each in per_layer(choice, lm.config)]


def encode_source(lm: Any, tokens: Tokens, lengths: PerRow, choice: PolicyChoice) -> KVCache:
    """Run a model's encoder once, over texts; the cache that its decoder attends to across.

    Args:
      lm: the model, which has an encoder.
      tokens, lengths: int32[batch, new], right-padded, and int32[batch].
      choice: a policy, of which codecs and places count.
    """
    rows, width = tokens.shape
    source = init_cache(lm.config, _policies(lm, choice), batch=rows, max_len=width, mesh=lm.mesh)
    found: KVCache = _read(lm.architecture, lm.params, tokens, lengths, source)
    return found


@functools.partial(jax.jit, static_argnames="model", donate_argnames="source")
def _read(model: Any, params: Any, tokens: Tokens, lengths: PerRow, source: KVCache) -> KVCache:
    found: KVCache = model.read(params, tokens, lengths, source)
    return found
