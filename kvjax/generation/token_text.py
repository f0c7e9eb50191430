"""Text from tokens as they come."""

from collections.abc import Callable, Iterable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8
"""Tokens before the first that are decoded with it."""
_PATIENCE = 64
"""Tokens after which text is given though it ends in an incomplete character."""


def readable(decode: Callable[[list[int]], str], tokens: list[int]) -> list[int]:
    """The last tokens, as many as make whole characters; none where there are none.

    Where tokens are single bytes, decoders of sentencepiece's kind replace a whole run of them that
    begins inside a character, so that what comes next could not be read either.
    """
    ends = (tokens[start:] for start in range(len(tokens)))
    return next((end for end in ends if _REPLACEMENT not in decode(end)), [])


class TextStream:
    """Decodes token by token, and holds text back while its last character is incomplete.

    Tokens are decoded behind those of the piece before, since a token's text can depend on its
    neighbours. (``tokenizers.decoders.DecodeStream`` goes the same way, but fails where a stray
    byte changes text that it has already given.)
    """

    def __init__(self, decode: Callable[[list[int]], str], after: Iterable[int] = ()):
        """Begin a text.

        Args:
          decode: token ids to text.
          after: tokens before the first; their text is not given again.
        """
        self._decode = decode
        before = [int(i) for i in after][-CONTEXT:]
        self._before = readable(decode, before) or before
        self._pending: list[int] = []
        self.held = ""
        """The text that is held back, which later tokens may change."""

    def push(self, token: int) -> str:
        """Take one token; the text that it completes, "" where there is none."""
        self._pending.append(int(token))
        text = self._new_text()
        incomplete = text.endswith(_REPLACEMENT) and len(self._pending) < _PATIENCE
        if not text or incomplete:
            self.held = text
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What is still held back, with replacement characters where it is incomplete."""
        return self._give(self._new_text()) if self._pending else ""

    def _give(self, text: str) -> str:
        self._before, self._pending, self.held = self._pending, [], ""
        return text

    def _new_text(self) -> str:
        before, whole = self._decode(self._before), self._decode(self._before + self._pending)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(self._pending)
