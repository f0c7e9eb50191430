"""The module of each family, by its configuration."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, PyTree

from kvjax.cache.checks import note_non_finite, note_tokens, validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.typing import Counts, Tokens
from kvjax.core.validation import ArgumentError, as_int, check_not_symbolic, is_traced
from kvjax.generation.encoder import SOURCE, without_source
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import apply_in_chunks
from kvjax.policies.model_config import common_heads

from .config import (
    Cohere2Config,
    Config,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    NeoXConfig,
    Phi3Config,
    T5Config,
)
from .config_gemma import Gemma3nConfig, Gemma4Config, SharingConfig
from .config_moe import Llama4Config, MixtralConfig, MoeConfig
from .decoder import Cohere2, Decoder, Phi3
from .frame import Frame, check_cache_of, check_devices, unknown_tokens, without_unknown
from .gemma import Gemma3n, Gemma4
from .gpt2 import GPT2
from .layers import param_shardings
from .moe import Llama4, Moe
from .neox import NeoX
from .t5 import T5
from .weights import Params, save

FAMILIES: dict[type, type[Frame]] = {
    LlamaConfig: Decoder,
    Cohere2Config: Cohere2,
    GemmaConfig: Decoder,
    GPT2Config: GPT2,
    Gemma3nConfig: Gemma3n,
    Gemma4Config: Gemma4,
    Llama4Config: Llama4,
    MixtralConfig: Moe,
    MoeConfig: Moe,
    NeoXConfig: NeoX,
    Phi3Config: Phi3,
    T5Config: T5,
}


@dataclass(frozen=True)
class Architecture:
    """A model without its parameters. It is hashable, and a static argument of ``jit``.

    Example:
      ```python
      step = jax.jit(lm.architecture.apply, donate_argnames="cache")
      cache = kvjax.init_cache(lm.config, max_len=64)
      logits, cache = step(lm.params, jnp.array([[5, 7, 11]]), cache)
      ```
    """

    config: Config

    @automatic_axes
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
          params: the parameters, a nested dict of arrays, as ``load`` and ``init_params`` return
            them.
          tokens: int32[batch, new], padded on the right.
          cache: the cache with the earlier tokens. None runs a pass without a cache, as in
            training.
          lengths: int32[batch], the number of real tokens in each row; by default all.
          last_only: whether to return only the logits of each row's last real token.
          max_len: the length for length-dependent rotary frequencies (dynamic, longrope) if there
            is no cache; by default ``new``. With a cache, the cache's length is used.

        Returns:
          The logits, float32[batch, new, vocab] (or [batch, 1, vocab] with ``last_only``) and, if a
          cache was given, the updated cache. A traced token id outside the vocabulary makes the
          logits NaN from this token on. With a cache, it also sets the status ``NO_SUCH_TOKEN``.

        Raises:
          ValueError: if a concrete token id is outside the vocabulary, the shapes of tokens and
            cache do not match, a tensor is missing in ``params``, or there are more tokens than a
            model with learned positions has positions.
        """
        if is_traced(last_only):
            raise ArgumentError(
                'last_only must be static: use jax.jit(..., static_argnames="last_only")',
                param="last_only",
            )
        if cache is not None:
            cache = validated("lm.apply", cache)
            if cache.mesh_sharding is not None:
                cache.mesh_sharding.check_context()
        tokens = jnp.asarray(tokens)
        if cache is not None:
            check_not_symbolic("tokens", tokens.shape)
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise ArgumentError(
                f"tokens must be [batch, new], each at least 1, got shape {tokens.shape}",
                param="tokens",
            )
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ArgumentError(f"tokens must be whole numbers, got {tokens.dtype}", param="tokens")
        # A narrow dtype may not have the vocabulary's size.
        tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32))
        if lengths is not None and jnp.shape(lengths) != tokens.shape[:1]:
            raise ArgumentError(
                f"lengths must be [batch={tokens.shape[0]}], got {list(jnp.shape(lengths))}",
                param="lengths",
            )
        wrong = unknown_tokens(tokens, lengths, self.config.vocab_size)
        if cache is None:
            logits = self._run(params, tokens, None, lengths, last_only, max_len)
            return logits if wrong is None else without_unknown(logits, wrong)
        check_cache_of(self.config, cache, tokens.shape[0])
        check_devices(params, cache)
        if wrong is not None:
            cache = note_tokens(cache, jnp.any(wrong, axis=1))

        def run(tokens: Tokens, cache: KVCache, lengths: Counts | None) -> tuple[Array, KVCache]:
            return self._run(params, tokens, cache, lengths, last_only, None)

        vocab = self.config.vocab_size
        return apply_in_chunks(run, tokens, cache, lengths, last_only=last_only, vocab=vocab)

    def _run(
        self,
        params: Params,
        tokens: Tokens,
        cache: KVCache | None,
        lengths: Counts | None,
        last_only: bool,
        max_len: int | None,
    ) -> Any:
        """Run one pass through the module."""
        graph, empty = _split(self.config)
        module = nnx.merge(graph, _restore(empty, params))
        logits, cache = module(
            tokens, cache, lengths=lengths, last_only=last_only, max_len=max_len,
            source=params.get(SOURCE),
        )  # fmt: skip
        if cache is None:
            return logits
        broken = ~jnp.all(jnp.isfinite(logits), axis=(1, 2))
        if lengths is not None:
            broken &= jnp.asarray(lengths) > 0
        return logits, note_non_finite(cache, broken)

    @property
    def encodes(self) -> bool:
        """Whether the model has an encoder."""
        return isinstance(self.config, T5Config)

    def read(self, params: Params, tokens: Tokens, lengths: Counts, source: KVCache) -> KVCache:
        """Run the encoder once per text, and store the keys and values for cross-attention.

        Args:
          params: nested dict of arrays.
          tokens: int32[batch, new], padded on the right.
          lengths: int32[batch], the number of real tokens in each row.
          source: an empty cache from ``init_cache(config, ...)`` that fits ``new`` tokens, with a
            row for each text.

        Returns:
          The filled ``source``. Pass it to ``apply`` as ``params["source"]``. It is differentiable
          if its codecs are ``Raw``.

        Raises:
          ValueError: if the model has no encoder, ``source`` is not empty or too small, or a
            concrete token id is outside the vocabulary. A traced one sets the status of the cache
            instead.
        """
        if not self.encodes:
            raise ValueError("the model has no encoder: give the tokens as its prompt")
        tokens = jnp.asarray(tokens)
        if tokens.shape != (source.batch, tokens.shape[-1]) or tokens.shape[1] > source.max_len:
            raise ValueError(
                f"tokens are {list(tokens.shape)}, but the source has {source.batch} row(s) of at "
                f"most {source.max_len} tokens"
            )
        if not is_traced(source.length) and jnp.any(source.length > 0):
            raise ValueError("the source already contains tokens: an encoder fills an empty cache")
        wrong = unknown_tokens(tokens, lengths, self.config.vocab_size)
        graph, empty = _split(self.config)
        module = nnx.merge(graph, _restore(empty, params))
        source = module.read(tokens, lengths, source)
        return source if wrong is None else note_tokens(source, jnp.any(wrong, axis=1))

    def abstract_params(self) -> Params:
        """Return the shapes and dtypes of the parameters, a nested dict of
        ``jax.ShapeDtypeStruct``."""
        return _plain(_split(self.config)[1])

    def param_shardings(self, mesh: Mesh | AbstractMesh) -> Params:
        """Return the sharding of each parameter over a mesh; see ``kvjax.models.layers``.

        Raises:
          ValueError: if the mesh does not have the axes of ``kvjax.make_mesh``.
        """
        config = self.config
        return param_shardings(
            self.abstract_params(), FAMILIES[type(config)].divided, mesh,
            heads=config.num_attention_heads, kv_heads=common_heads(config),
        )  # fmt: skip

    def save(self, params: Params, checkpoint: Path, folder: Path) -> None:
        """Write parameters as a checkpoint; see ``kvjax.models.weights``."""
        save(self.config, without_source(params), checkpoint, folder)

    @allow_host_to_device
    def init_params(self, seed: int) -> Params:
        """Create random parameters, for training from scratch."""

        def make(key: Array) -> Params:
            return _plain(nnx.state(FAMILIES[type(self.config)](self.config, rngs=nnx.Rngs(key))))

        return jax.jit(make)(jax.random.key(seed))


@functools.lru_cache(maxsize=64)
def _split(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
    """Return the module's graph, and its state with shapes instead of arrays."""
    family = FAMILIES[type(config)]
    return nnx.split(nnx.eval_shape(lambda: family(config, rngs=nnx.Rngs(0))))


def _plain(state: nnx.State) -> Params:
    """Convert an NNX state to nested dicts whose keys are strings."""

    def strings(node: PyTree) -> PyTree:
        if isinstance(node, dict):
            return {str(key): strings(child) for key, child in node.items()}
        return node

    return strings(nnx.to_pure_dict(state))


def _restore(empty: nnx.State, params: Params) -> nnx.State:
    """Convert ``params`` to an NNX state with the structure of ``empty``."""

    def fill(path: tuple[object, ...], variable: nnx.Variable) -> nnx.Variable:
        node: PyTree = params
        for key in path:
            if not isinstance(node, dict) or str(key) not in node:
                raise ValueError(f"params lack {'.'.join(map(str, path))!r}")
            node = node[str(key)]
        return variable.replace(node)

    flat = nnx.to_flat_state(empty)
    return nnx.from_flat_state([(path, fill(path, variable)) for path, variable in flat])


_OF_LAYERS = ("windows", "rope_layers")
"""Fields of configurations that have one entry per layer."""


def first_layers(lm: LanguageModel, layers: int) -> LanguageModel:
    """Make a model from a model's first layers, its final norm and its head. The new model shares
    the arrays of ``lm``, so as a draft model it needs no additional memory for weights.

    Source: Elhoushi et al., LayerSkip, arXiv:2404.16710; Zhang et al., arXiv:2309.08168.

    Args:
      lm: a model of ``kvjax.models``.
      layers: how many layers to keep, fewer than the model has.

    Raises:
      ValueError: if the model does not have more layers than ``layers``, its layers share keys and
        values, it has an encoder, or it is not a model of ``kvjax.models``.

    Example:
      ```python
      draft = kvjax.DraftModel(models.first_layers(lm, 2))
      result = kvjax.generate(lm, "The json module", draft=draft, max_new_tokens=8)
      ```
    """
    architecture = lm.architecture
    if not isinstance(architecture, Architecture):
        raise ValueError(
            "first_layers needs a model of kvjax.models; build a shorter model yourself"
        )
    config = architecture.config
    if isinstance(config, SharingConfig | T5Config):
        raise ValueError(
            f"first_layers does not support {config.model_type}: its layers depend on each other"
        )
    count = as_int("layers", layers, 1)
    if count >= config.num_hidden_layers:
        raise ArgumentError(
            f"layers is {count}, and must be less than the model's {config.num_hidden_layers}",
            param="layers",
        )
    cut = {name: getattr(config, name)[:count] for name in _OF_LAYERS if hasattr(config, name)}
    if isinstance(config, MoeConfig):
        cut["dense_layers"] = tuple(layer for layer in config.dense_layers if layer < count)
    shorter = Architecture(replace(config, num_hidden_layers=count, **cut))
    params = _like(shorter.abstract_params(), lm.params)
    return replace(lm, config=shorter.config, architecture=shorter, params=params)


def _like(names: PyTree, params: PyTree) -> PyTree:
    """Select the parameters with the given names."""
    if not isinstance(names, dict):
        return params
    return {name: _like(node, params[name]) for name, node in names.items()}
