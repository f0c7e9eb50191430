"""What a call of a model is refused for: its tokens, its cache, and where they are."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.transfer import fetch
from kvjax.core.typing import Counts, KeysValues, Queries
from kvjax.core.validation import is_traced
from kvjax.policies.model_config import layer_heads

from .config import Config
from .layers import Embedding, Hidden, merge_heads
from .sharding import Rules


def unknown_tokens(tokens: Array, lengths: Counts | None, size: int) -> Array | None:
    """bool[batch, new]: real tokens that a vocabulary of ``size`` has not; None where that can be
    seen, and is so of none.

    Raises:
      ValueError: if it can be seen, naming the first.
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
            f"token id {ids[row][wrong[row]][0]} in row {row}: the vocabulary has {size}, 0 to "
            f"{size - 1} (what stands behind a row's lengths may be anything)"
        )
    return None


def without_unknown(logits: Array, wrong: Array) -> Array:
    """Logits [batch, new or 1, vocab], NaN from the first token on that is ``wrong``."""
    behind = jnp.cumsum(wrong, axis=1, dtype=jnp.int32)[:, -logits.shape[1] :]
    return jnp.where(behind[:, :, None] > 0, jnp.nan, logits)


def check_cache_of(config: Config, cache: KVCache, batch: int) -> None:
    """Raise ``ValueError`` for a cache of another model, or of other rows."""
    if cache.batch != batch:
        raise ValueError(f"tokens have {batch} rows, the cache has {cache.batch}")
    count = len(cache.layers if cache.sources is None else cache.sources)
    if count != config.num_hidden_layers:
        raise ValueError(f"the cache has {count} layers, the model {config.num_hidden_layers}")
    of_model = layer_heads(config)
    for number, wanted in enumerate(of_model):
        layer = cache.layers[number if cache.sources is None else cache.sources[number]]
        if (layer.kv_heads, layer.head_dim) != wanted:
            raise ValueError(
                f"layer {number} of the cache has kv_heads={layer.kv_heads}, head_dim="
                f"{layer.head_dim}, the model {wanted[0]} and {wanted[1]}: make it with "
                "init_cache(lm.config, ...)"
            )


def check_devices(params: Any, cache: KVCache) -> None:
    """Raise ``ValueError`` for a cache elsewhere, where that can be seen: not inside ``jit``."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and not is_traced(cache.length):
        # JAX would move what is uncommitted, all of it at every call.
        ours, theirs = leaf.sharding.device_set, cache.length.sharding.device_set
        if ours != theirs:
            raise ValueError(
                f"the parameters are on {len(ours)} device(s), the cache on {len(theirs)}, not the "
                "same ones: lm.on(mesh) and init_cache(..., mesh=mesh) put both on one mesh"
            )


Rotary = tuple[RotaryTable | None, ...]
"""The table of each layer, None where it has none."""
Logits = Float[Array, "batch new vocab"]


class LayerContext(NamedTuple):
    """What the layers are told of a call, and hand on: the ``step``, each one's ``rotary``, and
    what a family has ``aside``."""

    step: kvjax.Step
    rotary: Rotary
    aside: Any = None

    def attend(
        self,
        layer: int,
        queries: Queries,
        keys: KeysValues | None,
        values: KeysValues | None,
        **sight: Any,
    ) -> tuple[Hidden, "LayerContext"]:
        """Attention of one layer, after its keys and values went to the cache.

        Args:
          layer: which one.
          queries, keys, values: [batch, heads or kv_heads, new, head_dim], unrotated; keys and
            values None where the cache has those of an earlier layer.
          sight: ``scale``, ``window``, ``soft_cap`` and the others of ``kvjax.self_attend``.

        Returns:
          [batch, new, heads * head_dim], and the call with the layer's tokens.
        """
        rotary = self.rotary[layer]
        mixed, step = self.step.attend(layer, queries, keys, values, rotary=rotary, **sight)
        return merge_heads(mixed), self._replace(step=step)


Layer = Callable[[Hidden, LayerContext], tuple[Hidden, LayerContext]]


class Frame(nnx.Module):
    """A decoder with its language-model head: the base of a family's module.

    ``divided``: what of each weight the devices of a mesh divide.
    """

    divided: ClassVar[Rules]

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        """The head: the family makes the rest, and that first."""
        size, tied = (config.vocab_size, config.hidden_size), config.tie_word_embeddings
        self.lm_head = None if tied else Embedding(*size, dtype=config.dtype, rngs=rngs)

    @abstractmethod
    def rotary(self, reach: int, limit: int) -> Rotary:
        """The tables for texts of up to ``reach`` tokens, at positions below ``limit``."""

    @abstractmethod
    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        """What the first layer is given."""

    def aside(self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None) -> Any:
        """What else the layers are handed, of the tokens, of what the first one is given, and of
        what an encoder has read."""
        return None

    @abstractmethod
    def layers(self) -> Iterable[Layer]:
        """The layers, in order."""

    @abstractmethod
    def logits(self, x: Hidden) -> Logits:
        """float32 logits of what the last layer gave."""

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
        """One pass; see ``Architecture.apply``."""
        new = tokens.shape[1]
        if cache is None:
            reach = max_len or new
            limit = max(reach, new)
        else:
            reach, limit = cache.reach, cache.max_len
        context = LayerContext(kvjax.step(cache, new, lengths=lengths), self.rotary(reach, limit))
        x = _on_every_device(self.embed(tokens, context), cache)
        context = context._replace(aside=self.aside(tokens, x, source))
        for layer in self.layers():
            x, context = layer(x, context)
            x = _on_every_device(x, cache)
        if last_only:
            x = _last_real(x, lengths)
        return self.logits(x), context.step.done()


def _on_every_device(x: Hidden, cache: KVCache | None) -> Hidden:
    """The same; on a mesh every device is to have all features of its rows, or the compiler may
    divide them as a table happens to be divided, and collect them again in every layer."""
    spread = None if cache is None else cache.spread
    if spread is None:
        return x
    return lax.with_sharding_constraint(x, spread.sharding(spread.row_spec()))


def _last_real(x: Hidden, lengths: Counts | None) -> Float[Array, "batch 1 hidden"]:
    """Each row's last real token: at ``lengths - 1``, or the last of all."""
    if lengths is None:
        return x[:, -1:]
    at = jnp.clip(jnp.asarray(lengths, jnp.int32) - 1, 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)
