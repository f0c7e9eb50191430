"""A beam search some of whose beams have guides: each goes on from a copy of its parent's.

A step is two programs, as of rows that have guides (``guided``).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.stages import Lowered

from kvjax.core.transfer import fetch
from kvjax.generation.beams import programs
from kvjax.generation.beams.searching import Beams
from kvjax.generation.beams.session import BeamSession, Report
from kvjax.generation.guides.masks import CopyableGuide, Guide, guide_mask, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import Session
from kvjax.sampling.filters import ALL_ALLOWED, Logits


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
        going = (score > -np.inf) & ~np.repeat(done, self._beams.width, axis=1)
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
            logits, request.filters, self._beams, self._session.context, self._state, self._past,
            self._settings, self._numbers, self._limit, self._allowed(), request.logprobs,
        )  # fmt: skip

    def _allowed(self) -> np.ndarray:
        return self._guides.bits()


class BeamGuides:
    """The guides of beams, as they go along their texts. ``guides``: one a row, or None."""

    def __init__(self, guides: Sequence[CopyableGuide | None], beams: Beams, words: int) -> None:
        self._beams, self._words = beams, words
        # At first one beam of each group is there. The given ones stay at the beginning.
        self._guides = [
            guide.copy() if guide is not None and row % beams.width == 0 else None
            for row, guide in enumerate(guides)
        ]

    def go_on(self, tokens: np.ndarray, parents: np.ndarray, going: np.ndarray) -> None:
        """Let rows go on from others, and take in their tokens: int32[rows], the parents counted
        within a prompt; of rows that are not ``going`` on, bool[rows], none."""
        after: list[CopyableGuide | None] = [None] * len(self._guides)
        taken: set[int] = set()
        rows = np.flatnonzero(going).tolist()
        for row in rows:
            at = row - row % self._beams.beams + int(parents[row])
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


def guides_along(
    lm: LanguageModel, request: GenerationRequest, texts: Sequence[Sequence[int]]
) -> tuple[Guide | None, ...] | None:
    """The guides of the request, behind all tokens of the texts that are given back, as many of
    each prompt; None where it has none."""
    if request.guides is None or request.search is None:
        return None
    found: list[Guide | None] = []
    for number, tokens in enumerate(texts):
        prompt, at = divmod(number, request.search.kept)
        guide = request.guides[prompt * request.samples + at]
        found.append(guide)
        if guide is None:
            continue
        go_along(guide, tokens, mask_words(lm.config))
    return tuple(found)


def go_along(guide: Guide, tokens: Sequence[int], words: int) -> None:
    """Let a guide take in a text that was found."""
    for place, token in enumerate(tokens, 1):
        if place == len(tokens):
            # That it can't go on a guide knows where it is asked, and such a text ends there.
            guide_mask(guide, words)
        guide.accept(token)
