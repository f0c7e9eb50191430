"""What a request's text may go on with, by what followed earlier in it: looked up on the host."""

from collections.abc import Sequence

from kvjax.generation.drafts.asked import PromptLookup


class Lookups:
    """The text of a request, and where its beginnings have ended before: see ``PromptLookup``."""

    def __init__(self, draft: PromptLookup, tokens: Sequence[int]) -> None:
        self._draft, self._text = draft, list(tokens[:1])
        self._ends: dict[tuple[int, ...], int] = {}
        self.push(tokens[1:])

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            for count in range(self._draft.shortest, self._draft.longest + 1):
                if count <= len(self._text):
                    self._ends[tuple(self._text[-count:])] = len(self._text)
            self._text.append(token)

    def found(self, most: int) -> list[int]:
        """So many tokens that it may go on with; none where nothing was met before."""
        for count in range(self._draft.longest, self._draft.shortest - 1, -1):
            end = self._ends.get(tuple(self._text[-count:])) if count <= len(self._text) else None
            if end is not None:
                followed = self._text[end:]
                return [followed[n % len(followed)] for n in range(most)]
        return []
