"""A text whose tokens are known, and those of other texts that begin with it.

What a model has written stays the tokens that it drew: a tokenizer may cut the same text otherwise,
and then what the cache holds would be of no use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str, bool], list[int]]
"""A text's tokens; and whether it begins a text, or goes on with one."""


@dataclass(frozen=True)
class Known:
    """``text``, its tokens ``ids``, and ``marks`` where both may be cut, behind answers: the number
    of the turn, and how many characters and tokens there are up to there."""

    text: str = ""
    ids: tuple[int, ...] = ()
    marks: tuple[tuple[int, int, int], ...] = ()

    def before(self, turn: int) -> "Known":
        """What is known of the turns before one."""
        return Known(self.text, self.ids, tuple(mark for mark in self.marks if mark[0] < turn))

    def of(self, text: str) -> "Known":
        """What is known of another text: of its beginning."""
        fits = [mark for mark in self.marks if text.startswith(self.text[: mark[1]])]
        return Known(self.text, self.ids, tuple(fits))

    def tokens(self, text: str, encode: Encode) -> list[int]:
        """The tokens of a text: those that are known, and behind them what ``encode`` gives."""
        fits = self.of(text).marks
        if not fits:
            return encode(text, True)
        _, characters, count = fits[-1]
        rest = text[characters:]
        return [*self.ids[:count], *(encode(rest, False) if rest else ())]

    def answered(
        self, turn: int, text: str, ids: Sequence[int], answer: str, tokens: Sequence[int]
    ) -> "Known":
        """With a turn more: what was asked, its tokens, and what was answered, as far as ``tokens``
        make it."""
        marks = self.of(text).marks
        text, ids = text + answer, (*ids, *tokens)
        return Known(text, ids, (*marks, (turn, len(text), len(ids))))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
