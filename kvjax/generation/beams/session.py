"""A beam search as it runs: a session whose rows are beams."""

from typing import Any

import numpy as np
from jax.stages import Lowered

from kvjax.core.transfer import fetch
from kvjax.generation.beams import programs
from kvjax.generation.beams.searching import Beams, Search
from kvjax.generation.beams.steps import Numbers, Searched
from kvjax.generation.context import Cached
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import Session

Report = tuple[programs.Columns, Searched]
"""Of a dispatch: what each step chose, and where the search stands after it."""


class BeamSession:
    """``begin`` behind a session's prompts, and ``search`` again and again, with the session's
    ``make_room`` before it. Nothing here waits for the device, but ``rows_of``."""

    def __init__(self, request: GenerationRequest, session: Session) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._session = request, session
        self._search: Search = search
        self._beams: Beams = search.beams

    def begin(self) -> Report:
        """Choose the first tokens, from the logits after the prompts."""
        request, session, given = self._request, self._session, self._search
        past = session.expand_samples()
        numbers: Any = (
            np.float32(given.length_penalty), np.int32(given.early_stopping),
            np.float32(given.diversity_penalty),
        )  # fmt: skip
        self._numbers = session.put(Numbers(*numbers))
        self._limit, self._settings = (
            session.put(np.int32(request.max_new_tokens)),
            session.settings,
        )
        asked = np.arange(len(request.prompts)) < request.rows // request.samples
        context: Any = session.context
        since = context.length if context.cache is None else context.cache.length
        self._state, self._past, columns = programs.begin(
            session.logits, request.filters, self._beams, self._settings, self._numbers,
            self._limit, past, asked, since, request.logprobs, request.spread, self._allowed(),
        )  # fmt: skip
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
            lm.architecture, request.filters, self._beams, lm.params, self._session.context,
            self._state, self._past, self._settings, self._numbers, self._limit, steps,
            request.logprobs,
        )  # fmt: skip

    def keep(self, rows: np.ndarray, back: np.ndarray) -> bool:
        """Leave the session some rows, int[n], without their newest ``back`` tokens; or, where one
        can't forget so many, none."""
        cache = self._session.cache
        assert cache is not None
        if np.any(back > fetch(programs.forgettable(cache))[rows]):
            return False
        found = programs.kept(cache, rows, back)
        self._session.context = Cached(found)
        return True
