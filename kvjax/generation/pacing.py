"""How many steps a dispatch has: few where somebody waits for its text."""

import jax

from kvjax.generation.programs import CHUNK

_WATCHED_STEPS = 32
"""The most steps of a dispatch where somebody waits for its text."""
_TOGETHER_STEPS = 8
"""The same, where many processes run together."""
_PROMPT_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""A streamed dispatch that takes less grows, one that takes more shrinks."""


class Pace:
    """``steps``: of the next dispatch; ``watched``: somebody waits for text; ``stops``: there are
    strings that end one, behind which steps are in vain; ``most``: steps of each, where it waits
    for the one before, else None."""

    def __init__(self, *, watched: bool, stops: bool, most: int | None = None) -> None:
        # Processes that run together do the same steps, whatever time each takes.
        alone = jax.process_count() == 1
        first = 1 if alone else _TOGETHER_STEPS
        self.steps = first if watched else _WATCHED_STEPS if stops else CHUNK
        self._changes = watched and alone and most is None
        self.steps = most or self.steps

    def took(self, seconds: float) -> None:
        """Go by how long a dispatch took."""
        if self._changes and seconds < _PROMPT_SECONDS:
            self.steps = min(2 * self.steps, _WATCHED_STEPS)
        elif self._changes and seconds > _SLOW_SECONDS:
            self.steps = max(self.steps // 2, 1)
