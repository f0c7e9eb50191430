"""What an encoder reads before a decoder writes: once for a text, into a cache of its own."""

import functools
from dataclasses import replace
from typing import Any

import jax

from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache
from kvjax.core.typing import Rows, Tokens
from kvjax.layouts import Dense
from kvjax.policies.presets import PolicyChoice, per_layer

SOURCE = "source"
"""The key of that cache, beside a model's parameters."""
UNREAD = "this model's encoder has read no text: lm.reading(texts) lets it"


def encodes(lm: Any) -> bool:
    """Whether a model, loaded or its architecture alone, has an encoder."""
    return bool(getattr(getattr(lm, "architecture", lm), "encodes", False))


def has_read(lm: Any) -> bool:
    """Whether it has, and that has read what its rows go by."""
    return encodes(lm) and SOURCE in getattr(lm, "params", {})


def without_encoder(what: str, lm: Any) -> None:
    """Raise ``ValueError`` for a model with an encoder, of which there is no ``what``."""
    if encodes(lm):
        raise ValueError(
            f"{what} is of models without an encoder: what one reads has no place in it"
        )


def check_read(lm: Any) -> None:
    """Raise ``ValueError`` for a model whose encoder has read nothing."""
    if encodes(lm) and not has_read(lm):
        raise ValueError(UNREAD)


def read(lm: Any, tokens: Tokens, lengths: Rows, choice: PolicyChoice) -> KVCache:
    """Run a model's encoder once, over texts; the cache that its decoder attends to across.

    Args:
      lm: the model, which has an encoder.
      tokens, lengths: int32[batch, new], right-padded, and int32[batch].
      choice: a policy, of which codecs and places count: of a text that is read at once no token
        is the newest, so the layout is dense.
    """
    policies = [replace(each, layout=Dense()) for each in per_layer(choice, lm.config)]
    rows, width = tokens.shape
    source = init_cache(lm.config, policies, batch=rows, max_len=width, mesh=lm.mesh)
    found: KVCache = _read(lm.architecture, lm.params, tokens, lengths, source)
    return found


@functools.partial(jax.jit, static_argnames="model", donate_argnames="source")
def _read(model: Any, params: Any, tokens: Tokens, lengths: Rows, source: KVCache) -> KVCache:
    found: KVCache = model.read(params, tokens, lengths, source)
    return found
