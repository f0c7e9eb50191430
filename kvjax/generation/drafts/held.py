"""A session's drafts: what proposes them, its own text so far, and how they fare."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.generation import programs
from kvjax.generation.context import Cached
from kvjax.generation.drafts.acceptance import Acceptance, price_of, usual_length
from kvjax.generation.drafts.asked import Draft, DraftModel, PromptLookup, relative_size
from kvjax.generation.drafts.proposals import Drafter, Lookup, Second
from kvjax.generation.drafts.speculation import speculate
from kvjax.generation.model import Model
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.placement.device import Device
from kvjax.policies.model_config import position_limit


class Drafts:
    """``held``: the draft's own cache, None where there is none; ``fared``: how they fare;
    ``params``: of its model."""

    def __init__(self, lm: Any, request: GenerationRequest, draft: Draft, platform: str) -> None:
        self._request, self._draft, self._platform = request, draft, platform
        self._rows = len(request.row_prompts)
        self.held: Cached | None = None
        self.params: Any = None
        self._share = 0.0
        if isinstance(draft, DraftModel):
            self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
            self.params, self._share = self._lm.params, relative_size(lm, draft.lm)
        self._vocab = lm.config.vocab_size
        self.fared = Acceptance.new(self._rows)

    @property
    def architecture(self) -> Model:
        """Of its model."""
        return self._lm.architecture

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of its cache, by place."""
        return Counter() if self.held is None else Counter(nbytes(self.held.cache))

    def empty(self) -> Cached | None:
        """The cache that its model reads prompts into: as long as the other, as far as it has
        positions."""
        draft, request = self._draft, self._request
        if not isinstance(draft, DraftModel):
            return None
        limit = position_limit(self._lm.config)
        capacity = request.history_len if limit is None else min(request.history_len, limit)
        cache = allocate(
            self._lm.config, draft.cache, batch=len(request.prompts), max_len=capacity,
            initial_len=capacity, mesh=self._lm.mesh,
        )  # fmt: skip
        return Cached(cache)

    def read(self) -> None:
        """Let it read the prompts."""
        context: Any = self.empty()
        if context is None:
            return
        request = self._request
        logits = self._no_logits(context)
        texts = request.prompts if request.cache_tokens is None else request.row_sequences
        for chunk in prompt_chunks(
            replace(request, prompts=texts, cache_lengths=0 * request.cache_lengths)
        ):
            context, logits = programs.prefill(*self._reading(context, logits, chunk))
        if request.samples > 1:
            context, _ = programs.repeat_rows(context, logits, request.samples)
        self.held = context

    def decode(self, drafter: Drafter, call: tuple[Any, ...]) -> Any:
        """``programs.decode`` with drafts, of what that is given."""
        self.held, self.fared, *found = speculate(
            drafter, self.params, self.held, self.fared, *call
        )
        return found

    def lowered(self, drafter: Drafter, call: tuple[Any, ...]) -> Lowered:
        """The same, to be compiled."""
        held = self.empty() if self.held is None else self.held
        return speculate.lower(drafter, self.params, held, self.fared, *call)

    def lowered_reading(self, chunks: list[PromptChunk]) -> list[Lowered]:
        """Its reading of these chunks, likewise."""
        held = self.empty()
        if held is None:
            return []
        logits = self._no_logits(held)
        calls = [self._reading(held, logits, chunk) for chunk in chunks]
        return [programs.prefill.lower(*call) for call in calls]

    def _no_logits(self, context: Cached) -> Any:
        shape = len(self._request.prompts), self._lm.config.vocab_size
        return Device(spread=context.cache.spread).put(np.zeros(shape, np.float32))

    def _reading(self, context: Any, logits: Any, chunk: PromptChunk) -> tuple[Any, ...]:
        lm, last = self._lm, self._lm.config.vocab_size - 1
        tokens = jnp.minimum(chunk.tokens, last) if last + 1 < self._vocab else chunk.tokens
        return lm.architecture, lm.params, context, logits, tokens, chunk.lengths, chunk.ends

    def drafter(self, cache: KVCache, its: Cached | None) -> Drafter | None:
        """What proposes, as it is compiled for a cache, and ``its`` own: no more tokens at a time
        than these can forget; None where they can't forget any."""
        draft, rows = self._draft, self._rows
        length = draft.length or usual_length(self._platform, rows)
        for held in (cache, its and its.cache):
            if held is not None and held.max_rewind is not None:
                # Of what a stop string takes back, half is left.
                stops = bool(self._request.stop) and held is cache
                length = min(length, held.max_rewind // (2 if stops else 1))
        if length < 1:
            return None
        price = price_of(self._platform, rows, length, self._share) if draft.adaptive else None
        if isinstance(draft, PromptLookup):
            return Lookup(length, price, draft.shortest, draft.longest)
        config = self._lm.config
        return Second(length, price, self.architecture, config.vocab_size, self._vocab)
