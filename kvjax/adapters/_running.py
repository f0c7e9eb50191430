"""The call that runs, for attention layers that are handed queries, keys and values and nothing
else: frameworks' own, which a model can't give a call to carry."""

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jaxtyping import Float

from kvjax.attention.step import Step, step
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable
from kvjax.core.typing import Array, Counts, Positions, Tokens
from kvjax.core.validation import as_int

TokensFirst = Float[Array, "batch new heads head_dim"]
"""The order of axes that frameworks' attention has."""

_current: contextvars.ContextVar["RunningCall | None"] = contextvars.ContextVar(
    "call", default=None
)


class RunningCall:
    """A call while a model runs: each of its attention layers goes on with what the one before it
    has left in ``step``."""

    def __init__(self, begun: Step) -> None:
        self.step, self._ended = begun, False

    @property
    def positions(self) -> Positions:
        """Where the call's tokens stand, for learned positions: as of ``kvjax.Step``."""
        return self.step.positions

    def attend(
        self,
        layer: int,
        queries: TokensFirst,
        keys: TokensFirst,
        values: TokensFirst,
        *,
        rotary: RotaryTable | None = None,
        **sight: Any,
    ) -> TokensFirst:
        """A layer's attention, tokens before heads: as ``kvjax.Step.attend``."""
        if self._ended:
            raise ValueError("the call has ended: done() stands behind the model's last layer")
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
        mixed, self.step = self.step.attend(layer, q, k, v, rotary=rotary, **sight)
        return jnp.swapaxes(mixed, 1, 2)

    def done(self) -> KVCache | None:
        """The cache with the call's tokens; None where there is none."""
        self._ended = True
        return self.step.done()


@contextlib.contextmanager
def running(
    cache: KVCache | None, tokens: Any, *, lengths: Counts | None = None
) -> Iterator[RunningCall]:
    """Run a model's layers as one call on a cache; arguments and errors as of ``kvjax.step``::

        with running(cache, tokens, lengths=lengths) as call:
            logits = model(tokens)      # its layers have this module's attention
        return logits, call.done()

    Layers must be traced where the call is: not inside a scan, a ``remat`` or a ``jit`` of their
    own, through which what they leave can't be carried. There models hand a ``kvjax.Step`` on.
    """
    call = RunningCall(step(cache, tokens, lengths=lengths))
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)


def current_call() -> RunningCall | None:
    """The call that runs, None outside of ``running``."""
    return _current.get()


def positions(tokens: Array) -> Positions:
    """Where tokens [batch, new] stand, for learned positions: int32[batch, new] in the call that
    runs, or 0 on, [1, new]."""
    call = current_call()
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] if call is None else call.positions


def call_model(
    model: Callable[..., Any], tokens: Tokens, cache: KVCache | None, lengths: Counts | None
) -> tuple[Array, KVCache | None]:
    """A model whose call has a parameter ``cache`` is given ``(tokens, cache, lengths)``, and gives
    ``(logits, cache)``; any other is given tokens, inside ``running``, and gives logits."""
    if "cache" in inspect.signature(model).parameters:
        return model(tokens, cache, lengths)
    with running(cache, tokens, lengths=lengths) as call:
        logits = model(tokens)
    return logits, call.done()


def check_layer_number(layer: Any) -> int:
    """The number of a layer, as an attention of it is made."""
    return as_int("layer", layer, 0)
