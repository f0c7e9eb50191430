"""A model as a pure function: what is static is split off once, parameters are a plain dict."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from kvjax.cache.admission import admit
from kvjax.core.checks import is_traced
from kvjax.core.typing import Counts, Tokens
from kvjax.cache.state import KVCache
from kvjax.cache.status import note_non_finite

from . import gpt2, llama
from .config import Config, GemmaConfig, GPT2Config, LlamaConfig
from .gemma import Gemma
from .gpt2 import GPT2
from .llama import Llama
from .sharding import param_shardings

Params = dict[str, Any]
"""Nested dicts of arrays; the keys on the way to one are the parts of its name."""

PIECE = 1024
"""Tokens of a prompt that are fed together, at most."""

_FAMILIES: dict[type, Any] = {LlamaConfig: Llama, GemmaConfig: Gemma, GPT2Config: GPT2}
_DIVIDED = {LlamaConfig: llama.DIVIDED, GemmaConfig: llama.DIVIDED, GPT2Config: gpt2.DIVIDED}


@dataclass(frozen=True)
class Architecture:
    """A model without its parameters: hashable, so it can be a static argument of ``jit``."""

    config: Config

    def apply(
        self,
        params: Params,
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        lengths: Counts | None = None,
        last_only: bool = False,
        max_len: int | None = None,
    ) -> Any:
        """Run the model.

        Args:
          params: nested dict of arrays, as ``load`` and ``init_params`` give it.
          tokens: int32[batch, new], right-padded where rows differ.
          cache: what came before; None runs the training pass.
          lengths: int32[batch], real tokens of this call, a row; by default all.
          last_only: logits of each row's last real token only.
          max_len: without a cache, the length that length-dependent rotary kinds (dynamic,
            longrope) go by; by default ``new``. With a cache it is the cache's.

        Returns:
          float32[batch, new, vocab] (``[batch, 1, vocab]`` with ``last_only``), and, if a cache
          was given, the cache with the new tokens in it.

        Raises:
          ValueError: if the shapes of tokens and cache do not fit, ``params`` lack a tensor, or
            there are more tokens than a model with learned positions has.
        """
        if is_traced(last_only):
            raise ValueError('last_only is no array: jax.jit(..., static_argnames="last_only")')
        if cache is not None and cache.spread is not None:
            cache.spread.check_context()
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ValueError(f"tokens must be [batch, new], none of them 0, got {tokens.shape}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be whole numbers, got {tokens.dtype}")
        if lengths is not None and jnp.shape(lengths) != tokens.shape[:1]:
            raise ValueError(
                f"lengths must be [batch={tokens.shape[0]}], got {list(jnp.shape(lengths))}"
            )
        if cache is not None:
            self._check_cache(cache, tokens.shape[0])
            _check_devices(params, cache)
        if cache is None or tokens.shape[1] <= (size := _piece(cache, last_only, tokens.shape[1])):
            return self._run(params, tokens, cache, lengths, last_only, max_len)
        return self._in_pieces(params, tokens, cache, lengths, last_only, size)

    def _run(
        self,
        params: Params,
        tokens: Tokens,
        cache: KVCache | None,
        lengths: Counts | None,
        last_only: bool,
        max_len: int | None,
    ) -> Any:
        """One pass through the module."""
        graph, empty = _split(self.config)
        module = nnx.merge(graph, _restore(empty, params))
        logits, cache = module(tokens, cache, lengths=lengths, last_only=last_only, max_len=max_len)
        if cache is None:
            return logits
        broken = ~jnp.all(jnp.isfinite(logits), axis=(1, 2))
        if lengths is not None:
            broken &= jnp.asarray(lengths) > 0
        return logits, note_non_finite(cache, broken)

    def _in_pieces(
        self,
        params: Params,
        tokens: Tokens,
        cache: KVCache,
        lengths: Counts | None,
        last_only: bool,
        size: int,
    ) -> Any:
        """A long call in parts of ``size`` tokens."""
        batch, new = tokens.shape
        count = -(-new // size)
        # All of a row's tokens or none: a part that fits must not follow one that did not.
        cache, taken = admit(cache, new, lengths)
        parts = jnp.pad(tokens, ((0, 0), (0, count * size - new)))
        parts = parts.reshape(batch, count, size).swapaxes(0, 1)
        real = jnp.clip(taken - size * jnp.arange(count)[:, None], 0, size).astype(jnp.int32)

        def one(carry: tuple[KVCache, Array], part: tuple[Array, Array]) -> Any:
            (cache, last), (tokens, lengths) = carry, part
            logits, cache = self._run(params, tokens, cache, lengths, last_only, None)
            if not last_only:
                return (cache, last), logits
            return (cache, jnp.where((lengths > 0)[:, None, None], logits, last)), None

        last = jnp.zeros((batch, 1, self.config.vocab_size), jnp.float32)
        (cache, last), every = jax.lax.scan(one, (cache, last), (parts, real))
        if last_only:
            return last, cache
        logits = every.swapaxes(0, 1).reshape(batch, count * size, -1)
        return logits[:, :new], cache

    def _check_cache(self, cache: KVCache, batch: int) -> None:
        config = self.config
        if cache.batch != batch:
            raise ValueError(f"tokens have {batch} rows, the cache has {cache.batch}")
        count = len(cache.layers if cache.sources is None else cache.sources)
        if count != config.num_hidden_layers:
            raise ValueError(f"the cache has {count} layers, the model {config.num_hidden_layers}")
        wanted = (config.num_key_value_heads, config.head_dim)
        for number, layer in enumerate(cache.layers):
            if (layer.kv_heads, layer.head_dim) != wanted:
                raise ValueError(
                    f"layer {number} of the cache has kv_heads={layer.kv_heads}, head_dim="
                    f"{layer.head_dim}, the model {wanted[0]} and {wanted[1]}: make it with "
                    "init_cache(lm.config, ...)"
                )

    def abstract_params(self) -> Params:
        """Shapes and dtypes of the parameters: a nested dict of ``jax.ShapeDtypeStruct``."""
        return _plain(_split(self.config)[1])

    def param_shardings(self, mesh: Mesh | AbstractMesh) -> Params:
        """The sharding of each parameter over a mesh: see ``kvjax.models.sharding``.

        Raises:
          ValueError: if the mesh has other axes than ``kvjax.make_mesh`` gives it.
        """
        config = self.config
        return param_shardings(
            self.abstract_params(), _DIVIDED[type(config)], mesh,
            heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
        )  # fmt: skip

    def init_params(self, seed: int) -> Params:
        """Random parameters, for training from scratch."""

        def make(key: Array) -> Params:
            return _plain(nnx.state(_FAMILIES[type(self.config)](self.config, rngs=nnx.Rngs(key))))

        return jax.jit(make)(jax.random.key(seed))


def _check_devices(params: Params, cache: KVCache) -> None:
    """Raise ``ValueError`` for a cache elsewhere, where that can be seen: not inside ``jit``."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and not is_traced(cache.length):
        if not leaf.committed:  # JAX puts it where the rest is
            return
        ours, theirs = leaf.sharding.device_set, cache.length.sharding.device_set
        if ours != theirs:
            raise ValueError(
                f"the parameters are on {len(ours)} device(s), the cache on {len(theirs)}, not the "
                "same ones: lm.on(mesh) and init_cache(..., mesh=mesh) put both on one mesh"
            )


def _piece(cache: KVCache, last_only: bool, new: int) -> int:
    """Tokens of a call that are fed together: as many as rings have slack for, and where only the
    last logits are wanted no more than ``PIECE``, for a long text's hidden states would take more
    memory than its cache. A policy that lets a call see its own tokens raw is not cut."""
    exact = any(layer.policy.prefill == "exact" for layer in cache.layers)
    usual = PIECE if last_only and not exact else new
    return min(usual, cache.chunk or usual)


@functools.lru_cache(maxsize=64)
def _split(config: Config) -> tuple[Any, Any]:
    """The module's graph, and its state with shapes in place of arrays."""
    family = _FAMILIES[type(config)]
    return nnx.split(nnx.eval_shape(lambda: family(config, rngs=nnx.Rngs(0))))


def _plain(state: Any) -> Params:
    """An NNX state as nested dicts whose keys are strings."""

    def strings(node: Any) -> Any:
        if isinstance(node, dict):
            return {str(key): strings(child) for key, child in node.items()}
        return node

    return strings(nnx.to_pure_dict(state))


def _restore(empty: Any, params: Params) -> Any:
    """``params`` in the form of the state ``empty``."""

    def fill(path: tuple[Any, ...], variable: Any) -> Any:
        node: Any = params
        for key in path:
            if not isinstance(node, dict) or str(key) not in node:
                raise ValueError(f"params lack {'.'.join(map(str, path))!r}")
            node = node[str(key)]
        return variable.replace(node)

    flat = nnx.to_flat_state(empty)
    return nnx.from_flat_state([(path, fill(path, variable)) for path, variable in flat])
