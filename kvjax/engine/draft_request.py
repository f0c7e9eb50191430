"""What a request's tokens are to be drafted by, checked."""

from dataclasses import dataclass
from typing import Any

from kvjax.engine.drafts import CHECKED, Drafting
from kvjax.generation.drafts.acceptance import price_of
from kvjax.generation.drafts.asked import Draft, DraftModel, draft_of, relative_size
from kvjax.generation.loaded_model import LanguageModel

ENGINES = "engine"
"""What the engine was made with."""


@dataclass(frozen=True)
class Proposers:
    """What requests of an engine can be drafted by.

    ``lm``: the model; ``own``: what the engine was made with, None for nothing; ``platform``; and
    how many rows are checked ``together``.
    """

    lm: LanguageModel
    own: Draft | None
    platform: str
    together: int

    def asked(self, given: Any, guide: Any, beams: int) -> Drafting | None:
        """For a request that asks for ``given``; None for nothing.

        Raises:
          ValueError: if it is no draft, or a model that the engine does not have; for a guide that
            can't be copied.
        """
        along = guide is None or hasattr(guide, "copy")
        if isinstance(given, str) and given == ENGINES:
            # Not asked for: where it can't be, the request goes without.
            draft = self.own if along and beams == 1 else None
        else:
            draft = draft_of(self.lm, given)
        if draft is None:
            return None
        if isinstance(draft, DraftModel) and draft is not self.own:
            raise ValueError(
                "an engine drafts with the model that it was made with, Engine(lm, draft=...): a "
                "request asks for that, 'engine', or for 'lookup', a PromptLookup or None"
            )
        if not along:
            raise ValueError("a guide beside a draft has copy(), and goes along it with that")
        if not draft.adaptive:
            return Drafting(draft, None)
        share = relative_size(self.lm, draft.lm) if isinstance(draft, DraftModel) else 0.0
        return Drafting(draft, price_of(self.platform, self.together, CHECKED, share))
