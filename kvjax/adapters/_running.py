"""The running call, for framework layers that only receive queries, keys and values.

A model can't pass a call through such layers, so the layers read it from a context variable. The
``attention_fn`` of Flax NNX and Linen works this way.
"""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Float, PyTree

from kvjax.attention.attend import AttentionOptions, self_attend
from kvjax.attention.step import Step, step
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, Positions, Tokens
from kvjax.core.validation import as_int

TokensFirst = Float[Array, "batch new heads head_dim"]
"""The axis order of frameworks' attention functions."""

_current: contextvars.ContextVar["RunningCall | None"] = contextvars.ContextVar(
    "call", default=None
)


class RunningCall:
    """A call that is running. Each attention layer updates ``step``, and the next layer uses the
    updated ``step``."""

    def __init__(self, step: Step) -> None:
        self.step, self._ended = step, False

    @property
    def positions(self) -> Positions:
        """Positions of the call's tokens, for learned position embeddings; see ``Step``."""
        return self.step.positions

    def attend(
        self,
        layer: int,
        queries: TokensFirst,
        keys: TokensFirst,
        values: TokensFirst,
        *,
        rotary: RotaryTable | None = None,
        **sight: Unpack[AttentionOptions],
    ) -> TokensFirst:
        """Call ``kvjax.attention.Step.attend`` with arrays in the axis order of ``TokensFirst``."""
        if self._ended:
            raise ValueError("the call has ended: call done() after the model's last layer")
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
        output, self.step = self.step.attend(layer, q, k, v, rotary=rotary, **sight)
        return jnp.swapaxes(output, 1, 2)

    def done(self) -> KVCache | None:
        """End the call and return the cache with its tokens; None without a cache."""
        self._ended = True
        return self.step.done()


@contextlib.contextmanager
def running(
    cache: KVCache | None, tokens: Tokens | int, *, lengths: Counts | None = None
) -> Iterator[RunningCall]:
    """Run a model's layers as one call on a cache. Arguments and errors are as for ``kvjax.step``::

        with running(cache, tokens, lengths=lengths) as call:
            logits = model(tokens)      # its layers have this module's attention
        return logits, call.done()

    Call the layers directly inside the ``with`` block, not inside a ``scan``, ``remat`` or ``jit``
    that begins there, because the updated cache could not leave it. Models with such layers pass a
    ``kvjax.attention.Step`` from layer to layer instead.

    Example:
      ```python
      from flax import nnx
      from kvjax.adapters.nnx import attention_fn, running

      attention = nnx.MultiHeadAttention(
          4, 64, decode=False, attention_fn=attention_fn(0), rngs=nnx.Rngs(0)
      )
      cache = kvjax.init_cache(kvjax.memory.ModelShape(1, 64, 256, 4, 4, 16, 97), max_len=64)
      with running(cache, 3) as call:
          output = attention(jnp.ones((1, 3, 64)))
      cache = call.done()
      ```
    """
    call = RunningCall(step(cache, tokens, lengths=lengths))
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


def current_call() -> RunningCall | None:
    """Return the running call; None outside of ``running``."""
    return _current.get()


def positions(tokens: Array) -> Positions:
    """Return the positions of tokens [batch, new], for learned position embeddings.

    Inside ``running``, returns the positions in the cache, int32[batch, new]. Otherwise returns 0
    to ``new - 1``, int32[1, new].

    Example:
      ```python
      from kvjax.adapters.nnx import positions

      print(positions(jnp.array([[5, 7, 11]])))  # [[0 1 2]]
      ```
    """
    call = current_call()
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if call is None else call.positions


def call_model(
    model: Callable[..., PyTree], tokens: Tokens, cache: KVCache | None, lengths: Counts | None
) -> tuple[Array, KVCache | None]:
    """Call a model and return (logits, cache).

    A model with a parameter ``cache`` is called with ``(tokens, cache, lengths)``. Any other model
    is called with the tokens inside ``running``, and returns logits.
    """
    if "cache" in inspect.signature(model).parameters:
        return model(tokens, cache, lengths)
    with running(cache, tokens, lengths=lengths) as call:
        logits = model(tokens)
    return logits, call.done()


def check_layer_number(layer: object) -> int:
    """Check and return the index of a layer, an integer from 0 on."""
    return as_int("layer", layer, 0)


@dataclass(frozen=True, eq=False)
class CachedAttention:
    """An ``attention_fn`` that uses the cache of the running call.

    Two objects are equal if they were created with the same arguments, so programs of equal models
    are compiled once.
    """

    layer: int
    own: Callable[..., TokensFirst]
    rotary: RotaryTable | None
    sight: AttentionOptions

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of ``own``. Linen passes only arguments that are in the signature."""
        return inspect.signature(self.own)

    def _key(self) -> tuple[object, ...]:
        return self.layer, self.own, id(self.rotary), *sorted(self.sight.items())

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CachedAttention) and self._key() == other._key()

    def __call__(
        self, query: TokensFirst, key: TokensFirst, value: TokensFirst, *args: Any, **options: Any
    ) -> TokensFirst:
        """Compute attention on arrays [batch, new, heads, head_dim]."""
        call, sight = current_call(), self.sight
        if call is None and self.rotary is None and not sight:
            return self.own(query, key, value, *args, **options)
        if options.get("dropout_rate") and not options.get("deterministic", False):
            raise ValueError("kvjax's attention has no dropout: give deterministic=True")
        if call is None:
            heads_first = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
            return jnp.swapaxes(self_attend(*heads_first, rotary=self.rotary, **sight), 1, 2)
        return call.attend(self.layer, query, key, value, rotary=self.rotary, **sight)


def cached_attention(
    layer: int, own: Callable[..., TokensFirst], rotary: RotaryTable | None, sight: AttentionOptions
) -> CachedAttention:
    """Create the ``attention_fn`` of a layer.

    Inside ``running``, the function uses the call's cache. Outside of ``running``, it calls
    ``own``, Flax's function. If ``rotary`` or an option of ``sight`` is given, it calls kvjax's
    causal attention without a cache instead.

    Raises:
      ValueError: if ``layer`` is not a layer index.
    """
    return CachedAttention(check_layer_number(layer), own, rotary, sight)
