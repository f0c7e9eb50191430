"""The forward pass of all families (embedding, layers, head), and checks of its arguments."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

import kvjax
from kvjax.attention.attend import AttentionOptions
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.transfer import fetch
from kvjax.core.typing import Counts, KeysValues, Queries
from kvjax.core.validation import is_traced
from kvjax.policies.model_config import layer_heads

from .config import Config
from .layers import Embedding, Hidden, Rules, merge_heads


def unknown_tokens(tokens: Array, lengths: Counts | None, size: int) -> Array | None:
    """Find token ids outside a vocabulary of ``size`` tokens, ignoring padding.

    Returns:
      bool[batch, new] if the tokens are traced; None if they are concrete and all are valid.

    Raises:
      ValueError: if a concrete token id is invalid. The message names the first.
    """
    seen = not any(is_traced(x) for x in (tokens, lengths)) and tokens.is_fully_addressable
    numbers = np if seen else jnp
    ids = fetch(tokens) if seen else tokens
    wrong = (ids < 0) | (ids >= size)
    if lengths is not None:
        wrong &= numbers.arange(ids.shape[1])[None] < numbers.asarray(lengths)[:, None]
    if not seen:
        return wrong
    if np.any(wrong):
        row = int(np.argmax(np.any(wrong, axis=1)))
        raise ValueError(
            f"token id {ids[row][wrong[row]][0]} in row {row}: the vocabulary has {size} ids, 0 to "
            f"{size - 1} (padding after a row's length may be anything)"
        )
    return None


def without_unknown(logits: Array, wrong: Array) -> Array:
    """Set logits [batch, new or 1, vocab] to NaN from a row's first ``wrong`` token on."""
    wrong_so_far = jnp.cumsum(wrong, axis=1, dtype=jnp.int32)[:, -logits.shape[1] :]
    return jnp.where(wrong_so_far[:, :, None] > 0, jnp.nan, logits)


def check_cache_of(config: Config, cache: KVCache, batch: int) -> None:
    """Raise ``ValueError`` if a cache does not fit the model or the number of rows."""
    if cache.batch != batch:
        raise ValueError(f"tokens have {batch} rows, the cache has {cache.batch}")
    count = len(cache.layers if cache.sources is None else cache.sources)
    if count != config.num_hidden_layers:
        raise ValueError(f"the cache has {count} layers, the model {config.num_hidden_layers}")
    of_model = layer_heads(config)
    for number, expected in enumerate(of_model):
        layer = cache.layers[number if cache.sources is None else cache.sources[number]]
        if (layer.kv_heads, layer.head_dim) != expected:
            raise ValueError(
                f"layer {number} of the cache has kv_heads={layer.kv_heads}, head_dim="
                f"{layer.head_dim}, but the model has {expected[0]} and {expected[1]}: make the "
                "cache with init_cache(lm.config, ...)"
            )


def check_devices(params: PyTree, cache: KVCache) -> None:
    """Raise ``ValueError`` if parameters and cache are on different devices. Inside ``jit``, where
    devices are not known, nothing is checked."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and not is_traced(cache.length):
        # JAX would copy uncommitted arrays to the other devices in every call.
        ours, theirs = leaf.sharding.device_set, cache.length.sharding.device_set
        if ours != theirs:
            raise ValueError(
                f"the parameters are on {len(ours)} device(s) and the cache on {len(theirs)} other "
                "ones: use lm.on(mesh) and init_cache(..., mesh=mesh) with the same mesh"
            )


Rotary = tuple[RotaryTable | None, ...]
"""The rotary table of each layer; None for layers without rotary positions."""
Logits = Float[Array, "batch new vocab"]


class LayerContext(NamedTuple):
    """The state that the layers of one forward pass share.

    Attributes:
      step: the call on the cache.
      rotary: the rotary table of each layer.
      extra: additional inputs of a family's layers, such as per-layer embeddings.
    """

    step: kvjax.attention.Step
    rotary: Rotary
    extra: PyTree = None

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: KeysValues | None,
        values: KeysValues | None,
        **options: Unpack[AttentionOptions],
    ) -> tuple[Hidden, "LayerContext"]:
        """Append a layer's keys and values to the cache, and attend.

        Args:
          layer: the index of the layer.
          queries, keys, values: [batch, heads or kv_heads, new, head_dim], not rotated. Keys and
            values are None if the layer attends to the keys and values of an earlier layer.
          options: ``scale``, ``window``, ``soft_cap`` and other options of ``kvjax.self_attend``.

        Returns:
          The output, [batch, new, heads * head_dim], and the context with the updated cache.
        """
        rotary = self.rotary[layer]
        output, step = self.step.attend(layer, queries, keys, values, rotary=rotary, **options)
        return merge_heads(output), self._replace(step=step)


Layer = Callable[[Hidden, LayerContext], tuple[Hidden, LayerContext]]
LayerClass = Callable[..., Layer]


class Frame(nnx.Module):
    """A decoder with its language-model head: the base class of the families' modules.

    ``divided`` says which axis of each weight a mesh divides, see ``models/layers.py``.
    """

    divided: ClassVar[Rules]

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """Create the head. Subclasses create the other modules first."""
        size, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(*size, dtype=config.dtype, rngs=rngs)

    @abstractmethod
    def rotary(self, reach: int, limit: int) -> Rotary:
        """Return the rotary tables for sequences of up to ``reach`` tokens, at positions below
        ``limit``."""

    @abstractmethod
    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        """Return the input of the first layer."""

    def extra(self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None) -> PyTree:
        """Compute additional inputs of the layers from the tokens, the first layer's input ``x``
        and the encoder's cache ``source``."""
        return None

    @abstractmethod
    def layers(self) -> Iterable[Layer]:
        """Return the layers, in order."""

    @abstractmethod
    def logits(self, x: Hidden) -> Logits:
        """Compute float32 logits from the last layer's output."""

    def __call__(
        self,
        tokens: Int[Array, "batch new"],
        cache: KVCache | None,
        *,
        lengths: Counts | None,
        last_only: bool,
        max_len: int | None,
        source: KVCache | None = None,
    ) -> tuple[Logits, KVCache | None]:
        """Run one forward pass; see ``Architecture.apply``."""
        new = tokens.shape[1]
        if cache is None:
            reach = max_len or new
            limit = max(reach, new)
        else:
            reach, limit = cache.reach, cache.max_len
        context = LayerContext(kvjax.step(cache, new, lengths=lengths), self.rotary(reach, limit))
        x = _on_every_device(self.embed(tokens, context), cache)
        context = context._replace(extra=self.extra(tokens, x, source))
        for layer in self.layers():
            x, context = layer(x, context)
            x = _on_every_device(x, cache)
        if last_only:
            x = _last_real(x, lengths)
        return self.logits(x), context.step.done()


def _on_every_device(x: Hidden, cache: KVCache | None) -> Hidden:
    """Constrain hidden states so that each device of a mesh has all features of its rows. Otherwise
    the compiler may shard features in the same way as a weight, and gather them in every layer."""
    mesh_sharding = None if cache is None else cache.mesh_sharding
    if mesh_sharding is None:
        return x
    return lax.with_sharding_constraint(x, mesh_sharding.sharding(mesh_sharding.row_spec()))


def _last_real(x: Hidden, lengths: Counts | None) -> Float[Array, "batch 1 hidden"]:
    """Return the hidden state of each row's last real token, at ``lengths - 1``."""
    if lengths is None:
        return x[:, -1:]
    at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)
