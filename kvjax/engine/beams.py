"""A request's beam search as it goes, on the host: what its rows have told, and what they go on
with. Its steps are those of ``kvjax.generation.beams.step``, of the likeliest tokens alone."""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow
from kvjax.engine.programs import EngineState
from kvjax.engine.request import MOST_ENDS, Request
from kvjax.generation.beams.results import History, best_sequences
from kvjax.generation.beams.session import BeamGuides, accept_all
from kvjax.generation.beams.step import SearchParams, advance, initial_state
from kvjax.generation.detokenizer import RowText, Tokenizer
from kvjax.generation.guides.masks import Guide
from kvjax.placement.pages import copy_pages
from kvjax.prefixes.checkpoints import row_arrays, with_row_arrays
from kvjax.sampling.scores import MAX_LOGPROBS, Scores, TokenScore

_begun = jax.jit(initial_state, static_argnames=("beams", "scores"))
_extended = jax.jit(advance, static_argnames=("beams", "scores"))


@dataclass(frozen=True)
class BeamResult:
    """A text that a search has found: its ``text`` and ``tokens``; ``score``, what it is worth;
    ``logprobs``, of its tokens, where they were asked for; ``reason``: ``"eos"`` or ``"length"``;
    ``guide``: behind its tokens, of a search with one; ``starts``: of each token, the characters
    of the text before it.
    """

    text: str
    tokens: list[int]
    score: float
    logprobs: list[TokenScore] | None
    reason: str
    guide: Guide | None
    starts: list[int]


class BeamSearchState:
    """The beams of a request, each a row of the engine from the second token on.

    ``width``: beams; ``running``: whether they have rows; ``going``: the beams that are fed next;
    ``chosen``: what they begin that with, their newest tokens and the beams that they go on from,
    int[width] each; None before the first step, and where that has been sent.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._search, self._beams = request, search, search.beams
        self._tokenizer, self.width = tokenizer, search.beams.num_beams
        self.rest()

    def rest(self) -> None:
        """Be as if nothing had been sent; what comes of that does not count."""
        self.running = False
        self.going, self.chosen = [0], None
        self._history = History(self.width)
        self._told: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []
        self._state: Any = None
        # Guides behind what was chosen last but for ``new``, and what they allow.
        self._guides: BeamGuides | None = None
        self._new: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        self._bits: Any = None
        self._words = 0

    def begin(self) -> None:
        """Begin, with a prompt that is read in the first row."""
        self.running = True
        with _on_the_host():
            since: Any = np.zeros(self.width, np.int32)
            self._state = fetch(_begun(np.ones(1, bool), since, self._beams, None))

    def allowed(self, beam: int, words: int) -> np.ndarray:
        """uint32[words]: bits of what may come next behind a beam, of a search with a guide."""
        self._words = words
        if self._guides is None:
            guides: Any = [self._request.guide] * self.width
            self._guides = BeamGuides(guides, self._beams, words)
            self._bits = self._guides.masks()
        if self._new is not None:
            self._guides.advance(*self._new)
            self._bits, self._new = self._guides.masks(), None
        found: np.ndarray = self._bits[beam]
        return found

    def take_in(self, scores: Any, at: int, beam: int) -> bool:
        """What may come next behind a beam: the likeliest tokens of an entry of ``Scores``; whether
        the search is at its end."""
        self._told[beam] = scores.ids[at, 0], scores.likeliest[at, 0]
        if len(self._told) == len(self.going):
            self._step()
        return bool(self._state.done.all())

    def results(self) -> list[BeamResult]:
        """The best texts, the best one first."""
        request, ended = self._request, self._state.finished
        if request.scores is not None:
            ended = replace(
                ended, token_scores=self._scores(ended.length - 1, ended.beam, ended.token)
            )
        every, found = (
            best_sequences(self._history, ended, self._search.num_return, request.scores),
            [],
        )
        for at, (tokens, score) in enumerate(zip(every.tokens[0], every.scores[0], strict=True)):
            text = RowText(self._tokenizer, request.tokens, guided=request.guide is not None)
            for token in tokens:
                text.push(token)
            text.finish("eos" if tokens and tokens[-1] in request.eos else "length")
            told = None if request.scores is None else [*map(_possible, every.token_scores[0][at])]
            guide: Any = request.guide and request.guide.copy()  # type: ignore[attr-defined]
            if guide is not None:
                accept_all(guide, tokens, self._words)
            found.append(
                BeamResult(text.text, tokens, score, told, str(text.reason), guide, text.starts())
            )
        return found

    def _step(self) -> None:
        """Choose the next tokens of all beams."""
        request, step = self._request, len(self._steps)
        ids = np.zeros((self.width, MAX_LOGPROBS), np.int32)
        likeliest = np.full(ids.shape, -np.inf, np.float32)
        for beam, each in self._told.items():
            ids[beam], likeliest[beam] = each
        self._told = {}
        self._steps.append((ids, likeliest))
        # A vocabulary of all these, in the order of the whole one.
        names = np.unique(ids)
        known: Any = np.full((self.width, ids.size), -np.inf, np.float32)
        rows = np.arange(self.width)[:, None]
        np.maximum.at(known, (rows, np.searchsorted(names, ids)), likeliest)
        eos: Any = np.full((1, MOST_ENDS), ids.size, np.int32)
        ends = np.flatnonzero(np.isin(names, list(request.eos)))
        eos[0, : len(ends)] = ends
        if step + 1 <= request.least:
            known[:, ends] = -np.inf
        state, chosen = self._extended(known[None], eos)
        names = np.pad(names, (0, ids.size - len(names)))
        before = state.finished
        now = before.length == step + 1
        ended = replace(before, token=np.where(now, names[before.token % ids.size], before.token))
        self._state = replace(state, token=names[state.token], finished=ended)
        token, parent, told = self._state.token[0], chosen.parent[0], None
        if request.scores is not None:
            told = self._scores(np.full_like(chosen.parent, step), chosen.parent, token)
            told = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), told)
        self._history.add((token[:, None], parent[:, None], told), 1)
        self.chosen = token, parent
        going = state.score[0] > -np.inf
        self.going, self._new = np.flatnonzero(going).tolist(), (token, parent, going)

    def _extended(self, known: Any, eos: Any) -> tuple[Any, Any]:
        search, limit = self._search, self._request.limit
        numbers: Any = (
            np.float32(search.length_penalty),
            np.int32(search.early_stopping),
            np.float32(search.diversity_penalty),
        )
        with _on_the_host():
            found = _extended(
                self._state,
                known,
                known,
                eos,
                SearchParams(*numbers),
                np.int32(limit),
                self._beams,
                None,
            )
            return fetch(found)

    def _scores(self, steps: np.ndarray, beams: np.ndarray, tokens: np.ndarray) -> Scores:
        """Of tokens that were chosen for beams in steps, int[1, n] each."""
        at = zip(np.maximum(steps, 0).ravel(), beams.ravel(), strict=True)
        each = [(self._steps[step][0][beam], self._steps[step][1][beam]) for step, beam in at]
        ids, known = (np.stack(x) for x in zip(*each, strict=True))
        own = np.max(np.where(ids == tokens.reshape(-1, 1), known, -np.inf), axis=1)
        found: Any = own, np.zeros_like(own), ids, known
        return Scores(*(x[None] for x in found))


def _possible(score: TokenScore) -> TokenScore:
    """Without likeliest tokens that a guide forbids, where it allows fewer."""
    return replace(score, likeliest=tuple(x for x in score.likeliest if x[1] > -np.inf))


@functools.cache
def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to do without
        return None


def _on_the_host() -> Any:
    """Where small programs run that nobody should wait behind."""
    device = _cpu()
    return contextlib.nullcontext() if device is None else jax.default_device(device)


@pytree_dataclass
class BranchInputs:
    """``count``: int32[], rows that go on from others, the first of ``targets``, each from its
    entry of ``sources``, none of which is a target; ``pages``: of each kind of layers, pages and
    what is copied to them, -1 for none. ``rows``: whose newest tokens are ``tokens`` instead,
    numbers that are no row's behind the last. int32[rows] each."""

    count: Array
    sources: PerRow
    targets: PerRow
    pages: tuple[tuple[PerRow, PerRow], ...]
    rows: PerRow
    tokens: PerRow


@functools.partial(jax.jit, static_argnames="kinds", donate_argnames="held")
def branch(held: EngineState, branches: BranchInputs, *, kinds: Any) -> tuple[EngineState, None]:
    """Let rows have what others have beside full pages, and stand where these do; and rows another
    newest token. ``kinds``: the numbers of the layers of each kind. Of the texts that filters go by
    nothing is taken along."""
    cache = held.cache

    def copy(number: Array, tree: Any) -> Any:
        source, target = branches.sources[number], branches.targets[number]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), tree)

    owns = [row_arrays(layer.near()) for layer in cache.layers], cache.written, held.progress
    owns, written, progress = lax.fori_loop(0, branches.count, copy, owns)
    layers = [with_row_arrays(layer, mine) for layer, mine in zip(cache.layers, owns, strict=True)]
    for entries, (sources, targets) in zip(kinds, branches.pages, strict=True):
        for entry in entries:
            layer = layers[entry]
            body, placement = (layer.keys, layer.values), layer.policy.placement
            keys, values = copy_pages(body, layer.orders, placement, sources, targets)
            layers[entry] = replace(layer, keys=keys, values=values)
    token = progress.token.at[branches.rows].set(branches.tokens, mode="drop")
    cache = replace(cache, layers=tuple(layers), written=written)
    return replace(held, cache=cache, progress=replace(progress, token=token)), None


def branch_inputs(
    rows: int,
    pairs: Sequence[tuple[int, int]],
    pages: Sequence[Sequence[tuple[int, int]]],
    newest: Sequence[tuple[int, int]],
) -> BranchInputs:
    """Of an engine of so many rows: ``pairs`` of rows, and of each kind of ``pages``, sources and
    targets; ``newest``: rows and tokens."""

    def columns(some: Sequence[tuple[int, int]], fill: int) -> Any:
        found = np.full((2, rows), fill, np.int32)
        found[:, : len(some)] = np.reshape(some, (-1, 2)).T
        return tuple(found)

    (sources, targets), (led, tokens) = columns(pairs, 0), columns(newest, rows)
    count, copied = np.int32(len(pairs)), tuple(columns(some, -1) for some in pages)
    return BranchInputs(count, sources, targets, copied, led, tokens)  # type: ignore[arg-type]
