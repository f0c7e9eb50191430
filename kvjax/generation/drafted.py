"""A session's drafts: what proposes them, its own text so far, and how they fare."""

from collections import Counter
from typing import Any

import jax
import numpy as np

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.generation import programs
from kvjax.generation.capacities import capacity_for
from kvjax.generation.contexts import Cached
from kvjax.generation.drafting import Drafter, Lookup, Second
from kvjax.generation.drafts import Draft, DraftModel, PromptLookup, relative_size
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.pace import Pace, price_of, usual_length
from kvjax.generation.prompts import prompt_chunks
from kvjax.generation.request import Request


class Drafts:
    """``held``: the draft's own cache, None where there is none; ``pace``: how they fare;
    ``params``: of its model."""

    def __init__(self, lm: LanguageModel, request: Request, draft: Draft, platform: str) -> None:
        self._request, self._draft, self._platform = request, draft, platform
        self._rows = len(request.texts)
        self.held: Cached | None = None
        self.params: Any = None
        self._share = 0.0
        if isinstance(draft, DraftModel):
            self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
            self.params, self._share = self._lm.params, relative_size(lm, draft.lm)
        self._vocab = lm.config.vocab_size
        self.pace = Pace.new(self._rows)

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of its cache, by place."""
        return Counter() if self.held is None else Counter(nbytes(self.held.cache))

    def read(self) -> None:
        """Let it read the prompts."""
        if not isinstance(self._draft, DraftModel):
            return
        lm, request = self._lm, self._request
        context: Any = Cached(draft_cache(lm, self._draft, request))
        empty = np.zeros((len(request.prompts), lm.config.vocab_size), np.float32)
        logits = _beside(context, empty)
        for chunk in prompt_chunks(request):
            tokens = np.minimum(chunk.tokens, lm.config.vocab_size - 1)
            context, logits = programs.prefill(
                lm.architecture, lm.params, context, logits, tokens, chunk.lengths, chunk.ends
            )
        if request.samples > 1:
            context, _ = programs.sampled(context, logits, request.samples)
        self.held = context

    def drafter(self, cache: KVCache) -> Drafter | None:
        """What proposes, as it is compiled for a cache: no more tokens at a time than that can
        forget; None where it can't forget any."""
        draft, rows = self._draft, self._rows
        length = draft.length or usual_length(self._platform, rows)
        for held in (cache, None if self.held is None else self.held.cache):
            if held is not None and held.revocable is not None:
                # Of what a stop string takes back, half is left.
                stops = bool(self._request.stops) and held is cache
                length = min(length, held.revocable // (2 if stops else 1))
        if length < 1:
            return None
        price = price_of(self._platform, rows, length, self._share) if draft.adaptive else None
        if isinstance(draft, PromptLookup):
            return Lookup(length, price, draft.shortest, draft.longest)
        config = self._lm.config
        return Second(length, price, self._lm.architecture, config.vocab_size, self._vocab)


def draft_cache(lm: LanguageModel, draft: DraftModel, request: Request) -> KVCache:
    """The cache that a draft's model reads the prompts into.

    Raises:
      ValueError: if it has no room for the text.
    """
    longest = max(map(len, request.prompts))
    try:
        capacity = capacity_for(lm.config, longest, request.limit, None, None)
    except ValueError as error:
        raise ValueError(f"of the draft: {error}") from None
    rows = len(request.prompts)
    return allocate(
        lm.config, draft.cache, batch=rows, max_len=capacity, room=capacity, mesh=lm.mesh
    )


def _beside(context: Cached, logits: np.ndarray) -> Any:
    spread = context.cache.spread
    if spread is not None:
        return spread.put(logits, lambda shape: spread.of_batch(shape, logits.shape[0]))
    return jax.device_put(logits, jax.tree.leaves(context)[-1].sharding)
