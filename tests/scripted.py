"""A model whose next tokens are written down: texts, ends and numbers are exactly as wished."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax


@dataclass(frozen=True)
class Scripted:
    """After the token at position ``p`` of a row comes ``params["script"][row, p + 1]``.

    Where ``params["scale"]`` is not finite at ``p + 1``, neither are the logits.
    """

    vocab_size: int
    num_hidden_layers: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 1
    dtype: str = "float32"
    position_limit: int | None = None

    def apply(self, params, tokens, cache=None, *, lengths=None, last_only=False, max_len=None):
        assert last_only, "generation has no use for the other logits"
        assert (max_len is None) == (cache is not None)
        batch, new = tokens.shape
        lengths = jnp.full(batch, new) if lengths is None else lengths
        before = 0 if cache is None else cache.length
        rows, at = jnp.arange(batch), before + lengths
        logits = params["scale"][rows, at][:, None] * (
            params["script"][rows, at][:, None] == jnp.arange(self.vocab_size)
        )
        logits = logits[:, None].astype(jnp.float32)
        if cache is None:
            return logits
        zeros = jnp.zeros((batch, 1, new, 1))
        cache = kvjax.append(cache, 0, zeros, zeros, lengths=lengths)
        return logits, kvjax.advance(cache, new, lengths)


@dataclass(frozen=True)
class Ends:
    """Generation defaults: the end-of-text tokens."""

    eos_token_ids: tuple[int, ...]


@dataclass
class ScriptedModel:
    """What generation needs of a loaded model."""

    config: Scripted
    params: Any
    tokenizer: Any
    generation: Ends
    architecture: Any
    mesh: None = None


def scripted(*rows, tokenizer: Any, vocab_size=0, eos=(), scale=None, position_limit=None):
    """A model that says ``rows`` (texts or lists of ids), counted from the prompt's beginning.

    A row that comes to its end says token 0 for ever. ``scale``: {(row, position): factor of the
    logits}, 10 elsewhere.
    """
    ids = [tokenizer.encode(row) if isinstance(row, str) else list(row) for row in rows]
    script = np.zeros((len(ids), 4096), np.int32)
    for row, tokens in enumerate(ids):
        script[row, : len(tokens)] = tokens
    factors = np.full(script.shape, 10, np.float32)
    for place, factor in (scale or {}).items():
        factors[place] = factor
    architecture = Scripted(vocab_size or int(tokenizer.vocab_size), position_limit=position_limit)
    params = {"script": jnp.asarray(script), "scale": jnp.asarray(factors)}
    return ScriptedModel(architecture, params, tokenizer, Ends(tuple(eos)), architecture)
