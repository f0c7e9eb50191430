"""A beam search as it runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.stages import Lowered

from kvjax.core.transfer import fetch
from kvjax.generation.beams import programs
from kvjax.generation.beams.config import BeamConfig, SearchConfig
from kvjax.generation.beams.step import SearchParams, SearchState
from kvjax.generation.context import Cached
from kvjax.generation.guides.masks import CopyableGuide, Guide, guide_mask, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import Session
from kvjax.sampling.filters import ALL_ALLOWED, Logits

Report = tuple[programs.Columns, SearchState]
"""Of a dispatch: what each step chose, and where the search stands after it."""


class BeamSession:
    """``begin`` behind a session's prompts, and ``search`` again and again, with the session's
    ``make_room`` before it. Nothing here waits for the device, but ``rows_of``."""

    def __init__(self, request: GenerationRequest, session: Session) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._session = request, session
        self._search: SearchConfig = search
        self._beams: BeamConfig = search.beams

    def begin(self) -> Report:
        """Choose the first tokens, from the logits after the prompts."""
        request, session, given = self._request, self._session, self._search
        past = session.expand_samples()
        numbers: Any = (
            np.float32(given.length_penalty),
            np.int32(given.early_stopping),
            np.float32(given.diversity_penalty),
        )
        self._numbers = session.put(SearchParams(*numbers))
        self._limit, self._settings = (
            session.put(np.int32(request.max_new_tokens)),
            session.sampling,
        )
        asked = np.arange(len(request.prompts)) < request.rows // request.samples
        context: Any = session.context
        since = context.length if context.cache is None else context.cache.length
        self._state, self._past, columns = programs.begin(
            session.logits,
            request.filters,
            self._beams,
            self._settings,
            self._numbers,
            self._limit,
            past,
            asked,
            since,
            request.logprobs,
            request.spread,
            self._allowed(),
        )
        del session.logits
        return columns, self._state

    def search(self, steps: np.int32) -> Report:
        """Choose so many tokens more of each beam, at most ``programs.CHUNK``."""
        session = self._session
        session.context, self._state, self._past, columns = programs.search(*self._searching(steps))
        return columns, self._state

    def lowered(self) -> dict[str, Lowered]:
        """The programs of ``search``, by name, to be compiled."""
        return {"search": programs.search.lower(*self._searching(np.int32(0)))}

    def _allowed(self) -> np.ndarray | None:
        """uint32[rows, words]: what may come next; None for anything."""
        return None

    def _searching(self, steps: np.int32) -> tuple[Any, ...]:
        request, lm = self._request, self._session.lm
        return (
            lm.architecture,
            request.filters,
            self._beams,
            lm.params,
            self._session.context,
            self._state,
            self._past,
            self._settings,
            self._numbers,
            self._limit,
            steps,
            request.logprobs,
        )

    def keep(self, rows: np.ndarray, back: np.ndarray) -> bool:
        """Leave the session some rows, int[n], without their newest ``back`` tokens; or, where one
        can't forget so many, none."""
        cache = self._session.cache
        assert cache is not None
        if np.any(back > fetch(programs.max_rewind(cache))[rows]):
            return False
        found = programs.keep_rows(cache, rows, back)
        self._session.context = Cached(found)
        return True


class GuidedBeamSession(BeamSession):
    """A ``BeamSession`` whose beams keep to guides. ``search`` takes one step, and waits for the
    one before it."""

    def __init__(self, request: GenerationRequest, session: Session) -> None:
        super().__init__(request, session)
        assert request.guides is not None
        self._guides = BeamGuides(request.guides, self._beams, mask_words(session.lm.config))

    def begin(self) -> Report:
        """Choose the first tokens, under the masks of the prompts."""
        self._columns, state = super().begin()
        return self._columns, state

    def search(self, steps: np.int32) -> Report:
        """Choose one token more of each beam."""
        session, lm = self._session, self._session.lm
        session.context, logits = programs.feed(
            lm.architecture, lm.params, session.context, self._state
        )
        # That runs; its report had these on the host before.
        token, parent, _ = self._columns
        token, parent, score, done = fetch((token, parent, self._state.score, self._state.done))
        going = (score > -np.inf) & ~np.repeat(done, self._beams.group_size, axis=1)
        self._guides.go_on(token[:, 0], parent[:, 0], going.ravel())
        session.context, self._state, self._past, self._columns = programs.choose(
            *self._choosing(logits)
        )
        return self._columns, self._state

    def lowered(self) -> dict[str, Lowered]:
        """The two programs of a step, by name, to be compiled."""
        session, lm = self._session, self._session.lm
        fed = programs.feed.lower(lm.architecture, lm.params, session.context, self._state)
        call = self._choosing(session.zeros_like(fed.out_info[1]))
        return {"feed": fed, "choose": programs.choose.lower(*call)}

    def _choosing(self, logits: Logits) -> tuple[Any, ...]:
        request = self._request
        return (
            logits,
            request.filters,
            self._beams,
            self._session.context,
            self._state,
            self._past,
            self._settings,
            self._numbers,
            self._limit,
            self._allowed(),
            request.logprobs,
        )

    def _allowed(self) -> np.ndarray:
        return self._guides.bits()


class BeamGuides:
    """The guides of beams, as they go along their texts. ``guides``: one a row, or None."""

    def __init__(
        self, guides: Sequence[CopyableGuide | None], beams: BeamConfig, words: int
    ) -> None:
        self._beams, self._words = beams, words
        # At first one beam of each group is there. The given ones stay at the beginning.
        self._guides = [
            guide.copy() if guide is not None and row % beams.group_size == 0 else None
            for row, guide in enumerate(guides)
        ]

    def go_on(self, tokens: np.ndarray, parents: np.ndarray, going: np.ndarray) -> None:
        """Let rows go on from others, and take in their tokens: int32[rows], the parents counted
        within a prompt; of rows that are not ``going`` on, bool[rows], none."""
        after: list[CopyableGuide | None] = [None] * len(self._guides)
        taken: set[int] = set()
        rows = np.flatnonzero(going).tolist()
        for row in rows:
            at = row - row % self._beams.num_beams + int(parents[row])
            guide = self._guides[at]
            if guide is not None:
                after[row] = guide.copy() if at in taken else guide
                taken.add(at)
        for row in rows:
            guide = after[row]
            if guide is not None:
                guide.accept(int(tokens[row]))
        self._guides = after

    def bits(self) -> np.ndarray:
        """uint32[rows, words]: what may come next; of rows without a guide anything."""
        bits = np.full((len(self._guides), self._words), ALL_ALLOWED, np.uint32)
        for row, guide in enumerate(self._guides):
            if guide is not None:
                bits[row] = guide_mask(guide, self._words)
        return bits


def search_of(request: GenerationRequest, session: Session) -> BeamSession:
    """The search of a request, with guides or without."""
    if request.guides is None:
        return BeamSession(request, session)
    return GuidedBeamSession(request, session)


def final_guides(
    lm: LanguageModel, request: GenerationRequest, texts: Sequence[Sequence[int]]
) -> tuple[Guide | None, ...] | None:
    """The guides of the request, behind all tokens of the texts that are given back, as many of
    each prompt; None where it has none."""
    if request.guides is None or request.search is None:
        return None
    found: list[Guide | None] = []
    for number, tokens in enumerate(texts):
        prompt, at = divmod(number, request.search.num_return)
        guide = request.guides[prompt * request.samples + at]
        found.append(guide)
        if guide is None:
            continue
        accept_all(guide, tokens, mask_words(lm.config))
    return tuple(found)


def accept_all(guide: Guide, tokens: Sequence[int], words: int) -> None:
    """Let a guide take in a text that was found."""
    for place, token in enumerate(tokens, 1):
        if place == len(tokens):
            # That it can't go on a guide knows where it is asked, and such a text ends there.
            guide_mask(guide, words)
        guide.accept(token)
