"""A generation some of whose rows have guides: each token waits for what the ones before allow.

A step is two programs: one feeds the newest tokens, one chooses the next. While the first runs, the
host makes the masks for the second.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow
from kvjax.generation.context import Context
from kvjax.generation.guides.masks import GuideMasks, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import DecodeOutput, Session
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores


class GuidedSession(Session):
    """A ``Session`` whose rows keep to their guides. ``decode`` takes one step, and waits for
    the token before it."""

    def __init__(self, lm: LanguageModel, request: GenerationRequest) -> None:
        super().__init__(lm, request)
        assert request.guides is not None
        self._masks = GuideMasks(request.guides, mask_words(lm.config), request.eos_token_ids)
        self._out: Array | None = None

    @property
    def max_steps(self) -> int:
        """The tokens that ``decode`` may take of a row."""
        return 1

    def begin(self) -> DecodeOutput:
        """Choose the first token of each row, under its mask."""
        self._past = self.expand_samples()
        zeros = np.zeros(self._rows, np.int32)
        self._progress = self.put(Progress(zeros, zeros, zeros > 0, zeros > 0))  # type: ignore[arg-type]
        logits = self.logits
        del self.logits
        return self._choose(logits, np.zeros(self._rows, bool))

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Choose one token more, of all rows but those to end now (bool[batch])."""
        self.context, logits = forward(
            self._lm.architecture, self._lm.params, self.context, self._progress, halt
        )
        return self._choose(logits, self._catch_up(halt))

    def lower_steps(self) -> dict[str, Lowered]:
        """The two programs of a step, to be compiled."""
        lm, halt = self._lm, np.zeros(self._rows, bool)
        fed = forward.lower(lm.architecture, lm.params, self.context, self._progress, halt)
        call = self._choose_args(self.zeros_like(fed.out_info[1]), halt)
        return {"feed": fed, "choose": choose.lower(*call)}

    def close(self, texts: list[list[int]] | None) -> None:
        """Give back what was lent; guides have taken in all that was chosen."""
        try:
            if texts is not None and self._out is not None:
                self._catch_up(np.zeros(self._rows, bool))
        finally:
            super().close(texts)

    def _catch_up(self, halt: Any) -> np.ndarray:
        """Let guides take in what was chosen; bool[batch], the rows that have ended."""
        # While a program runs: the report has had these on the host before.
        out, count, done = fetch((self._out, self._progress.count, self._progress.done))
        self._masks.accept(out, count)
        return np.asarray(halt) | done

    def _choose(self, logits: Logits, ended: np.ndarray) -> DecodeOutput:
        self._progress, self._past, out, scores = choose(*self._choose_args(logits, ended))
        self._out = out
        return DecodeOutput(out, self._progress, scores, None)

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
    model: Model, params: Any, context: Context, progress: Progress, halt: Any
) -> tuple[Context, Logits]:
    """Feed the newest token of the rows that go on; the logits behind it."""
    lengths: PerRow = (~(progress.done | halt)).astype(jnp.int32)
    logits, context = context.forward(model, params, progress.token[:, None], lengths)
    return context, gather_vocab(logits, context)


@functools.partial(jax.jit, static_argnames=("filters", "scores"), donate_argnames="past")
def choose(
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    progress: Progress,
    past: TokenHistory | None,
    halt: Any,
    allowed: Any,
    scores: int | None,
) -> tuple[Progress, TokenHistory | None, Array, Scores | None]:
    """The next token of the rows that go on, among those allowed, as a step of
    ``programs.decode``."""
    progress = replace(progress, done=progress.done | halt)
    progress, past, found = choose_and_score(
        progress, past, logits, filters, settings, limit, scores, allowed=allowed
    )
    out, found = jax.tree.map(lambda x: x[:, None], (progress.token, found))
    return progress, past, out, found
