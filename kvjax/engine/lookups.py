"""What a request's text may go on with, by what followed earlier in it: looked up on the host."""

from collections.abc import Sequence

from kvjax.generation.drafts.asked import PromptLookup

CHECKED = 7
"""Tokens of a draft that a program checks, at most."""
_PAUSE, _LONGEST_PAUSE = 8, 256
"""Tokens without a draft behind one of which none was accepted: doubled each time."""


class Lookups:
    """The text of a request, and where its beginnings have ended before: see ``PromptLookup``."""

    def __init__(self, draft: PromptLookup, tokens: Sequence[int]) -> None:
        self._draft, self._text = draft, list(tokens[:1])
        self._length = min(draft.length or CHECKED, CHECKED)
        self._ends: dict[tuple[int, ...], int] = {}
        self._pause = _PAUSE
        self._next = 0
        self.push(tokens[1:])

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            for count in range(self._draft.shortest, self._draft.longest + 1):
                if count <= len(self._text):
                    self._ends[tuple(self._text[-count:])] = len(self._text)
            self._text.append(token)

    @property
    def resting(self) -> bool:
        """Whether nothing is drafted for now."""
        return len(self._text) < self._next

    def found(self, most: int) -> list[int]:
        """So many tokens that it may go on with, at most; none where nothing was met before, or
        drafts were wrong of late."""
        most = min(most, self._length)
        if self.resting or most < 1:
            return []
        for count in range(self._draft.longest, self._draft.shortest - 1, -1):
            end = self._ends.get(tuple(self._text[-count:])) if count <= len(self._text) else None
            if end is not None:
                followed = self._text[end:]
                return [followed[n % len(followed)] for n in range(most)]
        return []

    def checked(self, accepted: int) -> None:
        """So many of a draft were right; the text has them already."""
        if accepted:
            self._pause = _PAUSE
        elif self._draft.adaptive:
            self._next = len(self._text) + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
