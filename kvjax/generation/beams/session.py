"""A beam search on the device: a session with a row for each beam, with or without guides."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.stages import Lowered

from kvjax.core.transfer import fetch
from kvjax.generation.beams import programs
from kvjax.generation.beams.step import BeamConfig, SearchConfig, SearchParams, SearchState
from kvjax.generation.guides.masks import CopyableGuide, Guide, guide_mask, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import Cached
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import Session
from kvjax.sampling.filters import ALL_ALLOWED, Logits

SearchOutput = tuple[programs.Columns, SearchState]
"""The choices of one dispatch, and the state after it."""


class BeamSession:
    """Runs a beam search on a session whose prompts have been prefilled.

    Call ``begin`` once, then ``search`` repeatedly, and before each of these calls the session's
    ``make_room``. Only ``keep`` waits for the device.
    """

    def __init__(self, request: GenerationRequest, session: Session) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._session = request, session
        self._search: SearchConfig = search
        self._beams: BeamConfig = search.beams

    def begin(self) -> SearchOutput:
        """Choose the first tokens, from the logits after the prompts."""
        request, session, config = self._request, self._session, self._search
        past = session.expand_samples()
        params: Any = (
            np.float32(config.length_penalty),
            np.int32(config.early_stopping),
            np.float32(config.diversity_penalty),
        )
        self._params = session.put(SearchParams(*params))
        self._limit = session.put(np.int32(request.max_new_tokens))
        self._settings = session.sampling
        real = np.arange(len(request.prompts)) < request.rows // request.samples
        context = session.context
        start = context.length if context.cache is None else context.cache.length
        self._state, self._past, columns = programs.begin(
            session.logits,
            request.filters,
            self._beams,
            self._settings,
            self._params,
            self._limit,
            past,
            real,
            start,
            request.logprobs,
            request.mesh_sharding,
            self._masks(),
        )
        del session.logits
        return columns, self._state

    def search(self, steps: np.int32) -> SearchOutput:
        """Choose ``steps`` more tokens for each beam. ``steps`` is at most ``MAX_STEPS``."""
        session = self._session
        session.context, self._state, self._past, columns = programs.search(
            *self._search_args(steps)
        )
        return columns, self._state

    def lowered(self) -> dict[str, Lowered]:
        """Lower the programs of ``search``, by name."""
        return {"search": programs.search.lower(*self._search_args(np.int32(0)))}

    def _masks(self) -> np.ndarray | None:
        """Return the token masks of the guides, uint32[rows, words]; None if all tokens are
        allowed."""
        return None

    def _search_args(self, steps: np.int32) -> tuple[object, ...]:
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
            self._params,
            self._limit,
            steps,
            request.logprobs,
        )

    def keep(self, rows: np.ndarray, rewound: np.ndarray) -> bool:
        """Keep only the rows ``rows`` (int[n]) of the cache, and rewind ``rewound`` tokens (int[n])
        of these rows. Returns False, and changes nothing, if a row can't be rewound that far."""
        cache = self._session.cache
        assert cache is not None
        if np.any(rewound > fetch(programs.max_rewind(cache))[rows]):
            return False
        self._session.context = Cached(programs.keep_rows(cache, rows, rewound))
        return True


class GuidedBeamSession(BeamSession):
    """A ``BeamSession`` with guides. ``search`` runs one step, and waits for the previous step."""

    def __init__(self, request: GenerationRequest, session: Session) -> None:
        super().__init__(request, session)
        assert request.guides is not None
        self._guides = BeamGuides(request.guides, self._beams, mask_words(session.lm.config))

    def begin(self) -> SearchOutput:
        """Choose the first tokens among those that the prompts' guides allow."""
        self._columns, state = super().begin()
        return self._columns, state

    def search(self, steps: np.int32) -> SearchOutput:
        """Choose one more token for each beam."""
        session, lm = self._session, self._session.lm
        session.context, logits = programs.feed(
            lm.architecture, lm.params, session.context, self._state
        )
        # While the model runs, advance the guides by the previous step's tokens.
        token, parent, _ = self._columns
        token, parent, score, done = fetch((token, parent, self._state.score, self._state.done))
        running = (score > -np.inf) & ~np.repeat(done, self._beams.group_size, axis=1)
        self._guides.advance(token[:, 0], parent[:, 0], running.ravel())
        session.context, self._state, self._past, self._columns = programs.choose(
            *self._choose_args(logits)
        )
        return self._columns, self._state

    def lowered(self) -> dict[str, Lowered]:
        """Lower the two programs of a step, by name."""
        session, lm = self._session, self._session.lm
        feed = programs.feed.lower(lm.architecture, lm.params, session.context, self._state)
        args = self._choose_args(session.zeros_like(feed.out_info[1]))
        return {"feed": feed, "choose": programs.choose.lower(*args)}

    def _choose_args(self, logits: Logits) -> tuple[object, ...]:
        request = self._request
        return (
            logits,
            request.filters,
            self._beams,
            self._session.context,
            self._state,
            self._past,
            self._settings,
            self._params,
            self._limit,
            self._masks(),
            request.logprobs,
        )

    def _masks(self) -> np.ndarray:
        return self._guides.masks()


class BeamGuides:
    """The guides of all beams. A beam that continues another one has a copy of its guide.

    ``guides`` has a guide or None for each row. The constructor copies the guides that it receives.
    """

    def __init__(
        self, guides: Sequence[CopyableGuide | None], beams: BeamConfig, words: int
    ) -> None:
        self._beams, self._words = beams, words
        # At first each group has one beam.
        self._guides = [
            guide.copy() if guide is not None and row % beams.group_size == 0 else None
            for row, guide in enumerate(guides)
        ]

    def advance(self, tokens: np.ndarray, parents: np.ndarray, running: np.ndarray) -> None:
        """Give each running row its parent's guide, and let it accept the row's token.

        ``tokens`` is int32[rows]. ``parents`` (int32[rows]) are beams of the same prompt.
        ``running`` is bool[rows].
        """
        after: list[CopyableGuide | None] = [None] * len(self._guides)
        taken: set[int] = set()
        rows = np.flatnonzero(running).tolist()
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

    def masks(self) -> np.ndarray:
        """Return the token masks, uint32[rows, words]. Rows without a guide allow all tokens."""
        masks = np.full((len(self._guides), self._words), ALL_ALLOWED, np.uint32)
        for row, guide in enumerate(self._guides):
            if guide is not None:
                masks[row] = guide_mask(guide, self._words)
        return masks


def search_of(request: GenerationRequest, session: Session) -> BeamSession:
    """Create the search of a request, with or without guides."""
    if request.guides is None:
        return BeamSession(request, session)
    return GuidedBeamSession(request, session)


def final_guides(
    lm: LanguageModel, request: GenerationRequest, sequences: Sequence[Sequence[int]]
) -> tuple[Guide | None, ...] | None:
    """Return copies of the request's guides after they have accepted the returned sequences; None
    without guides."""
    if request.guides is None or request.search is None:
        return None
    guides: list[Guide | None] = []
    for number, tokens in enumerate(sequences):
        prompt, at = divmod(number, request.search.num_return)
        guide = request.guides[prompt * request.samples + at]
        guides.append(guide)
        if guide is not None:
            accept_all(guide, tokens, mask_words(lm.config))
    return tuple(guides)


def accept_all(guide: Guide, tokens: Sequence[int], words: int) -> None:
    """Let a guide accept the tokens of a sequence."""
    for place, token in enumerate(tokens, 1):
        if place == len(tokens):
            # A guide notices that it can't continue when its mask is computed. The sequence then
            # ends with this token.
            guide_mask(guide, words)
        guide.accept(token)
