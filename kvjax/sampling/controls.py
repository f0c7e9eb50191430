"""The numbers by which tokens are drawn, and which of them there are."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from kvjax.core.trees import state
from kvjax.core.typing import Array
from kvjax.sampling.past import LogitsHook

NO_TOKEN = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Filters:
    """Which steps of ``sample`` there are: compiled in, hashable, as a static argument of ``jit``;
    or taken as the program runs, where they are traced (``Sampling.filters``). ``counts``: the
    frequency and presence penalties; ``ngrams``: ``no_repeat_ngram_size``; ``hook``: a user's own,
    that comes before all of them (``Past.hooked``); ``mesh``: whether the rows are of several
    devices, none of which should wait for another's."""

    greedy: bool | Array = True
    top_k: bool | Array = False
    top_p: bool | Array = False
    min_p: bool | Array = False
    typical_p: bool | Array = False
    repetition_penalty: bool | Array = False
    counts: bool | Array = False
    ngrams: bool | Array = False
    min_new_tokens: bool | Array = False
    bias: bool | Array = False
    mesh: bool = False
    hook: LogitsHook | None = None

    @property
    def marks(self) -> bool:
        """Whether they ask which tokens a row has, compiled in."""
        return bool(self.repetition_penalty)

    @property
    def whole(self) -> bool:
        """Whether they ask for all of a row's tokens, in their order."""
        return bool(self.counts) or bool(self.ngrams) or self.hook is not None


@state
class Sampling:
    """The numbers of ``sample``, traced, so that a new value compiles nothing: [batch] each, one a
    row. A row that a filter is not for has a number with which it changes nothing.

    ``seeds``: uint32[batch, 2], low and high word. ``eos``: int32[batch, n], padded with a number
    that is no token's. ``biased``, ``bias``: int32 and float32[batch, m], tokens, padded so, and
    what is added to their logits.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    repetition_penalty: Array
    frequency_penalty: Array
    presence_penalty: Array
    no_repeat_ngram_size: Array
    min_new_tokens: Array
    seeds: Array
    eos: Array
    biased: Array
    bias: Array

    @property
    def filters(self) -> Filters:
        """Those that some row needs, as truth values."""
        return Filters(
            greedy=jnp.all(self.temperature == 0),
            top_k=jnp.any(self.top_k < NO_TOKEN),
            top_p=jnp.any(self.top_p < 1),
            min_p=jnp.any(self.min_p > 0),
            typical_p=jnp.any(self.typical_p < 1),
            repetition_penalty=jnp.any(self.repetition_penalty != 1),
            counts=jnp.any((self.frequency_penalty != 0) | (self.presence_penalty != 0)),
            ngrams=jnp.any(self.no_repeat_ngram_size > 0),
            min_new_tokens=jnp.any(self.min_new_tokens > 0),
            bias=jnp.any(self.biased < NO_TOKEN),
        )
