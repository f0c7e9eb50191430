"""Beam search in an engine: the host's steps, and the program that copies rows.

A search has one row for each beam. The rows report their most likely tokens. With these candidates,
the host takes a step of ``kvjax.generation.beams.step``. Rows of beams that were dropped then
continue from other rows.
"""

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jaxtyping import PyTree

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.target import JaxDevice
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow
from kvjax.engine.programs import EngineState, LayerGroups
from kvjax.engine.request import MAX_EOS_TOKENS, Request
from kvjax.generation.beams.session import BeamGuides, accept_all
from kvjax.generation.beams.step import SearchParams, advance, initial_state
from kvjax.generation.beams.streaming import History, best_sequences
from kvjax.generation.detokenizer import RowText, Tokenizer
from kvjax.generation.guides.masks import Guide
from kvjax.placement.pages import copy_pages
from kvjax.prefixes.checkpoints import row_arrays, with_row_arrays
from kvjax.sampling.scores import MAX_LOGPROBS, Scores, TokenScore

_initial_state = jax.jit(initial_state, static_argnames=("beams", "scores"))
_advance = jax.jit(advance, static_argnames=("beams", "scores"))


@dataclass(frozen=True)
class BeamResult:
    """A finished beam.

    Args:
      text: the new text.
      tokens: the new tokens.
      score: the sum of the tokens' log-probabilities, normalized by the length penalty.
      logprobs: log-probabilities of the tokens, if requested.
      finish_reason: ``"eos"`` or ``"length"``.
      guide: the request's guide after these tokens, if it has one.
      starts: for each token, the number of characters of ``text`` before it.
    """

    text: str
    tokens: list[int]
    score: float
    logprobs: list[TokenScore] | None
    finish_reason: str
    guide: Guide | None
    starts: list[int]


class BeamSearchState:
    """A request's beam search while it runs. From the second token on, each beam is a row.

    ``width`` is the number of beams. ``running`` says whether the search has rows. ``active`` lists
    the beams that take part in the next dispatch. ``chosen`` has the newest token and the parent of
    each beam, as two arrays int[width]. It is None before the first step, and after the rows have
    been branched.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._search, self._beams = request, search, search.beams
        self._tokenizer, self.width = tokenizer, search.beams.num_beams
        self.reset()

    def reset(self) -> None:
        """Start over after a preemption. Outputs that are still in flight are ignored."""
        self.running = False
        self.active, self.chosen = [0], None
        self._history = History(self.width)
        self._candidates: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []
        self._guides: BeamGuides | None = None
        # The last step, in which the guides have not yet been advanced:
        self._pending: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._mask_words = 0

    def begin(self) -> None:
        """Start the search. The first row prefills the prompt."""
        self.running = True
        with _on_host():
            since = np.zeros(self.width, np.int32)
            self._state = fetch(_initial_state(np.ones(1, bool), since, self._beams, None))

    def token_mask(self, beam: int, words: int) -> np.ndarray:
        """Return the token mask after a beam, uint32[words]. The bit of a token is set if the guide
        allows it."""
        self._mask_words = words
        if self._guides is None:
            guides: Any = [self._request.guide] * self.width
            self._guides = BeamGuides(guides, self._beams, words)
            self._masks = self._guides.masks()
        if self._pending is not None:
            self._guides.advance(*self._pending)
            self._masks, self._pending = self._guides.masks(), None
        return self._masks[beam]

    def add_candidates(self, scores: Scores, at: int, beam: int) -> bool:
        """Add the most likely next tokens of a beam, which are row ``at`` of ``scores`` (on the
        host). When all active beams have added theirs, take a step. Returns whether the search has
        ended."""
        ids, likeliest = np.asarray(scores.top_ids[at, 0]), np.asarray(scores.top_logprobs[at, 0])
        self._candidates[beam] = ids, likeliest
        if len(self._candidates) == len(self.active):
            self._step()
        return bool(self._state.done.all())

    def results(self) -> list[BeamResult]:
        """Return the best sequences of a finished search, best first."""
        request, finished = self._request, self._state.finished
        if request.logprobs is not None:
            scores = self._scores(finished.length - 1, finished.beam, finished.token)
            finished = replace(finished, token_scores=scores)
        best = best_sequences(self._history, finished, self._search.num_return, request.logprobs)
        results = []
        for at, (tokens, score) in enumerate(zip(best.tokens[0], best.scores[0], strict=True)):
            text = RowText(self._tokenizer, request.tokens, guided=request.guide is not None)
            for token in tokens:
                text.push(token)
            text.finish("eos" if tokens and tokens[-1] in request.eos else "length")
            logprobs = None
            if request.logprobs is not None:
                logprobs = [_without_forbidden(x) for x in best.token_scores[0][at]]
            guide: Any = request.guide and request.guide.copy()  # type: ignore[attr-defined]
            if guide is not None:
                accept_all(guide, tokens, self._mask_words)
            reason, starts = str(text.finish_reason), text.starts()
            results.append(BeamResult(text.text, tokens, score, logprobs, reason, guide, starts))
        return results

    def _step(self) -> None:
        """Choose the next tokens of all beams."""
        request, step = self._request, len(self._steps)
        ids = np.zeros((self.width, MAX_LOGPROBS), np.int32)
        likeliest = np.full(ids.shape, -np.inf, np.float32)
        for beam, candidates in self._candidates.items():
            ids[beam], likeliest[beam] = candidates
        self._candidates = {}
        self._steps.append((ids, likeliest))
        # The step uses a small vocabulary that has only the candidates, in the order of their ids.
        vocab = np.unique(ids)
        logprobs = np.full((self.width, ids.size), -np.inf, np.float32)
        rows = np.arange(self.width)[:, None]
        np.maximum.at(logprobs, (rows, np.searchsorted(vocab, ids)), likeliest)
        eos = np.full((1, MAX_EOS_TOKENS), ids.size, np.int32)
        eos_places = np.flatnonzero(np.isin(vocab, list(request.eos)))
        eos[0, : len(eos_places)] = eos_places
        if step + 1 <= request.min_new_tokens:
            logprobs[:, eos_places] = -np.inf
        state, chosen = self._advance(logprobs[None], eos)
        vocab = np.pad(vocab, (0, ids.size - len(vocab)))
        finished = state.finished
        just_finished = finished.length == step + 1
        tokens = np.where(just_finished, vocab[finished.token % ids.size], finished.token)
        finished = replace(finished, token=tokens)
        self._state = replace(state, token=vocab[state.token], finished=finished)
        token, parent, scores = self._state.token[0], chosen.parent[0], None
        if request.logprobs is not None:
            scores = self._scores(np.full_like(chosen.parent, step), chosen.parent, token)
            scores = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), scores)
        self._history.add((token[:, None], parent[:, None], scores), 1)
        self.chosen = token, parent
        active = state.score[0] > -np.inf
        self.active, self._pending = np.flatnonzero(active).tolist(), (token, parent, active)

    def _advance(self, logprobs: np.ndarray, eos: np.ndarray) -> PyTree:
        search, limit = self._search, np.int32(self._request.max_new_tokens)
        numbers: Any = (
            np.float32(search.length_penalty),
            np.int32(search.early_stopping),
            np.float32(search.diversity_penalty),
        )
        params = SearchParams(*numbers)
        with _on_host():
            state = self._state
            return fetch(_advance(state, logprobs, logprobs, eos, params, limit, self._beams, None))

    def _scores(self, steps: np.ndarray, beams: np.ndarray, tokens: np.ndarray) -> Scores:
        """Return the scores of tokens. Each token was chosen in a step after a beam; ``steps``,
        ``beams`` and ``tokens`` are int[1, n]."""
        places = zip(np.maximum(steps, 0).ravel(), beams.ravel(), strict=True)
        candidates = [
            (self._steps[step][0][beam], self._steps[step][1][beam]) for step, beam in places
        ]
        ids, likeliest = (np.stack(x) for x in zip(*candidates, strict=True))
        chosen = np.max(np.where(ids == tokens.reshape(-1, 1), likeliest, -np.inf), axis=1)
        fields: Any = chosen, np.zeros_like(chosen), ids, likeliest
        return Scores(*(x[None] for x in fields))


@pytree_dataclass
class BranchInputs:
    """Rows that continue from other rows. The arrays without a shape below are int32[rows].

    Attributes:
      count: int32[], the number of valid entries in ``sources`` and ``targets``.
      sources, targets: the row to copy from and the row to copy to. No target is also a source.
      pages: for each cache group, the pages to copy from and the pages to copy to. Entries of -1
        are skipped.
      rows, tokens: rows, and the newest token to set for each. ``rows`` is padded with a number
        that is not a row.
    """

    count: Array
    sources: PerRow
    targets: PerRow
    pages: tuple[tuple[PerRow, PerRow], ...]
    rows: PerRow
    tokens: PerRow

    @classmethod
    def build(
        cls,
        rows: int,
        pairs: Sequence[tuple[int, int]],
        pages: Sequence[Sequence[tuple[int, int]]],
        newest: Sequence[tuple[int, int]],
    ) -> "BranchInputs":
        """Make the inputs, padded to an engine's number of rows.

        Args:
          rows: the engine's number of rows.
          pairs: (source, target) pairs of rows.
          pages: for each cache group, (source, target) pairs of pages.
          newest: (row, token) pairs.
        """

        def columns(values: Sequence[tuple[int, int]], fill: int) -> Any:
            padded = np.full((2, rows), fill, np.int32)
            padded[:, : len(values)] = np.reshape(values, (-1, 2)).T
            return tuple(padded)

        (sources, targets), (changed, tokens) = columns(pairs, 0), columns(newest, rows)
        count: Any = np.int32(len(pairs))
        copies = tuple(columns(group, -1) for group in pages)
        return cls(count, sources, targets, copies, changed, tokens)


@functools.partial(jax.jit, static_argnames="groups", donate_argnames="engine_state")
def branch(
    engine_state: EngineState, inputs: BranchInputs, *, groups: LayerGroups
) -> tuple[EngineState, None]:
    """Copy the state of rows from sources to targets, except for full pages, and then set newest
    tokens.

    ``groups`` has the layer indices of each cache group. ``history`` is not copied, because beam
    searches do not use it.
    """
    cache = engine_state.cache

    def copy(number: Array, tree: PyTree) -> PyTree:
        source, target = inputs.sources[number], inputs.targets[number]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), tree)

    arrays = [row_arrays(layer.near()) for layer in cache.layers]
    carry = arrays, cache.written, engine_state.progress
    arrays, written, progress = lax.fori_loop(0, inputs.count, copy, carry)
    layers = [with_row_arrays(*pair) for pair in zip(cache.layers, arrays, strict=True)]
    for entries, (sources, targets) in zip(groups, inputs.pages, strict=True):
        for entry in entries:
            layer = layers[entry]
            body, placement = (layer.keys, layer.values), layer.policy.placement
            keys, values = copy_pages(body, layer.orders, placement, sources, targets)
            layers[entry] = replace(layer, keys=keys, values=values)
    token = progress.token.at[inputs.rows].set(inputs.tokens, mode="drop")
    cache = replace(cache, layers=tuple(layers), written=written)
    return replace(engine_state, cache=cache, progress=replace(progress, token=token)), None


def _without_forbidden(score: TokenScore) -> TokenScore:
    """Remove tokens that the guide forbids from a score. Such tokens fill up the list of the most
    likely tokens if the guide allows only a few."""
    return replace(score, top_logprobs=tuple(x for x in score.top_logprobs if x[1] > -np.inf))


@functools.cache
def _cpu() -> JaxDevice | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX has no CPU backend here
        return None


def _on_host() -> AbstractContextManager[object]:
    """Run small programs on the CPU, so that they do not wait for programs on the device."""
    device = _cpu()
    return contextlib.nullcontext() if device is None else jax.default_device(device)
