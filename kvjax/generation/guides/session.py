"""A generation with guides: the masks of each step depend on the tokens of the previous one.

A step is two programs: one processes the newest tokens, one chooses the next ones. While the first
runs, the host computes the masks for the second.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from jaxtyping import PyTree

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.context import Context
from kvjax.generation.guides.masks import GuideMasks, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import DecodeOutput, Session
from kvjax.sampling.filters import Allowed, Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores


class GuidedSession(Session):
    """A ``Session`` with guides. ``decode`` takes one step, and waits for the previous one."""

    def __init__(self, lm: LanguageModel, request: GenerationRequest) -> None:
        super().__init__(lm, request)
        assert request.guides is not None
        self._masks = GuideMasks(request.guides, mask_words(lm.config), request.eos_token_ids)
        self._tokens: Array | None = None

    @property
    def max_steps(self) -> int:
        """1, because the host computes masks between two steps."""
        return 1

    def begin(self) -> DecodeOutput:
        """Choose the first token of each row."""
        self._past = self.expand_samples()
        zeros = np.zeros(self._rows, np.int32)
        self._progress = self.put(Progress(zeros, zeros, zeros > 0, zeros > 0))  # type: ignore[arg-type]
        logits = self.logits
        del self.logits
        return self._choose(logits, np.zeros(self._rows, bool))

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Choose one more token per row. Rows in ``halt``, bool[batch], end now."""
        self.context, logits = forward(
            self._lm.architecture, self._lm.params, self.context, self._progress, halt
        )
        return self._choose(logits, self._catch_up(halt))

    def lower_steps(self) -> dict[str, Lowered]:
        """Lower the two programs of a step."""
        lm, halt = self._lm, np.zeros(self._rows, bool)
        lowered = forward.lower(lm.architecture, lm.params, self.context, self._progress, halt)
        call = self._choose_args(self.zeros_like(lowered.out_info[1]), halt)
        return {"feed": lowered, "choose": choose.lower(*call)}

    def close(self, texts: list[list[int]] | None) -> None:
        """As ``Session.close``; the guides then have accepted all tokens."""
        try:
            if texts is not None and self._tokens is not None:
                self._catch_up(np.zeros(self._rows, bool))
        finally:
            super().close(texts)

    def _catch_up(self, halt: np.ndarray | Array) -> np.ndarray:
        """Advance the guides past the chosen tokens. Returns bool[batch], rows that have ended."""
        # The next program already runs, and these small arrays have been fetched before.
        tokens, count, done = fetch((self._tokens, self._progress.count, self._progress.done))
        self._masks.accept(tokens, count)
        return np.asarray(halt) | done

    def _choose(self, logits: Logits, ended: np.ndarray) -> DecodeOutput:
        self._progress, self._past, tokens, scores = choose(*self._choose_args(logits, ended))
        self._tokens = tokens
        return DecodeOutput(tokens, self._progress, scores, None)

    def _choose_args(self, logits: Logits, ended: np.ndarray) -> tuple[Any, ...]:
        request, allowed = self._request, self._masks.next_masks(ended)
        return (
            logits,
            request.filters,
            self.sampling,
            self._limit,
            self._progress,
            self._past,
            ended,
            allowed,
            request.logprobs,
        )


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def forward(
    model: Model, params: PyTree, context: Context, progress: Progress, halt: RowMask
) -> tuple[Context, Logits]:
    """Process the newest token of each unfinished row, and return the logits after it."""
    lengths: PerRow = (~(progress.done | halt)).astype(jnp.int32)
    logits, context = context.forward(model, params, progress.token[:, None], lengths)
    return context, gather_vocab(logits, context)


@functools.partial(jax.jit, static_argnames=("filters", "logprobs"), donate_argnames="past")
def choose(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    limit: Array,
    progress: Progress,
    past: TokenHistory | None,
    halt: RowMask,
    allowed: Allowed,
    logprobs: int | None,
) -> tuple[Progress, TokenHistory | None, Array, Scores | None]:
    """Choose the next token of each unfinished row among the allowed ones. Tokens and scores have
    the shape [batch, 1]."""
    progress = replace(progress, done=progress.done | halt)
    progress, past, scores = choose_and_score(
        progress, past, logits, filters, sampling, limit, logprobs, allowed=allowed
    )
    tokens, scores = jax.tree.map(lambda x: x[:, None], (progress.token, scores))
    return progress, past, tokens, scores
