"""Incremental detokenization: text from tokens as they are generated, up to stop strings."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8
"""How many of the tokens before the first new token are decoded together with it."""
_MAX_PENDING = 64
"""After this number of tokens, text is returned even if it ends in an incomplete character."""


def whole_characters(decode: Callable[[list[int]], str], tokens: list[int]) -> list[int]:
    """Return the longest suffix of ``tokens`` that decodes to whole characters. It may be empty.

    If a run of byte tokens begins inside a character, decoders of SentencePiece tokenizers replace
    the whole run. Then the tokens after it could not be decoded either.
    """
    ends = (tokens[start:] for start in range(len(tokens)))
    return next((end for end in ends if _REPLACEMENT not in decode(end)), [])


class TextStream:
    """Decodes one token at a time, and withholds text while its last character is incomplete.

    New tokens are decoded together with the previous piece, because a token's text can depend on
    its neighbors. (``tokenizers.decoders.DecodeStream`` works the same way, but fails if a stray
    byte changes text that it has already returned.)

    Example:
      ```python
      stream = models.TextStream(lm.tokenizer.decode)
      text = "".join(stream.push(token) for token in lm.tokenizer.encode("The json module"))
      text += stream.finish()
      ```
    """

    def __init__(self, decode: Callable[[list[int]], str], after: Iterable[int] = ()):
        """Begin a text.

        Args:
          decode: a function from token ids to text.
          after: the tokens before the first new one. Their text is not returned.
        """
        self._decode = decode
        before = [int(i) for i in after][-CONTEXT:]
        self._before = whole_characters(decode, before) or before
        self._pending: list[int] = []
        self.withheld = ""
        """The withheld text, which later tokens may change."""

    def push(self, token: int) -> str:
        """Add a token. Returns the text that it completes, which may be empty."""
        self._pending.append(int(token))
        text = self._new_text()
        incomplete = text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING
        if not text or incomplete:
            self.withheld = text
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return the withheld text, with replacement characters for incomplete characters."""
        return self._release(self._new_text()) if self._pending else ""

    def _release(self, text: str) -> str:
        self._before, self._pending, self.withheld = self._pending, [], ""
        return text

    def _new_text(self) -> str:
        before, whole = self._decode(self._before), self._decode(self._before + self._pending)
        if whole.startswith(before):
            return whole[len(before) :]
        return self._decode(self._pending)


class TokenDecoder(Protocol):
    """An object that decodes one token at a time, like ``TextStream``."""

    def push(self, token: int, /) -> str: ...
    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """The methods that generation needs from a tokenizer; see ``kvjax.models.text.Tokenizer``."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def stream(self, after: Iterable[int] = (), /) -> TokenDecoder: ...


class RowText:
    """The new tokens and the text of one row, up to the beginning of a stop string.

    ``take`` returns the text and tokens that no stop string can remove, piece by piece.

    Attributes:
      tokens: all new tokens.
      text: the text of the new tokens.
      finish_reason: why the row has ended; None while it runs.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        *,
        least: int = 0,
        guided: bool = False,
    ) -> None:
        """Begin a row.

        Args:
          tokenizer: the tokenizer. With None, the text stays empty.
          prompt: the tokens before the new ones.
          stops: strings that end the row.
          least: the minimum number of new tokens before a stop string may end the row. A stop
            string may begin in these tokens, but they are kept.
          guided: whether a guide checks every character. A leading space is then kept, although
            SentencePiece tokenizers would omit it.
        """
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stops, self._least, self._uncounted = stops, least, 0
        self._stream: TokenDecoder | None = None
        if tokenizer is not None:
            before = _after_a_letter(tokenizer, prompt) if guided else prompt
            self._stream = tokenizer.stream(before)
        # For each token whose text is known, the index in `text` where it starts and ends. For
        # other tokens, the text that was withheld before them.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._withheld_before: list[str] = []
        self._taken = (0, 0)

    def push(self, token: int) -> None:
        """Append a token, if the row has not ended."""
        if self.finish_reason is None:
            self._withheld_before.append(getattr(self._stream, "withheld", ""))
            self.tokens.append(token)
            text = "" if self._stream is None else self._stream.push(token)
            if text or self._stream is None:
                self._extend(text)

    def finish(self, reason: str) -> None:
        """End the row for ``reason``, if it has not ended."""
        if self.finish_reason is None:
            self._extend("" if self._stream is None else self._stream.finish())
        if self.finish_reason is None:
            self.finish_reason = reason

    def cut(self) -> None:
        """End the row where the last ``take`` ended, if the row has not ended."""
        if self.finish_reason is None:
            characters, tokens = self._taken
            self.text = self.text[:characters]
            del self.tokens[tokens:]
            self.finish_reason = "stopped"

    def starts(self, first: int = 0) -> list[int]:
        """Return the index in ``text`` at which each token from ``first`` on starts, as far as it
        is known. Tokens after a stop string start at the end of ``text``."""
        return [min(start, len(self.text)) for start in self._starts[first : len(self.tokens)]]

    @property
    def num_taken(self) -> int:
        """The number of tokens that ``take`` has returned."""
        return self._taken[1]

    @property
    def pending(self) -> int:
        """The number of tokens that a stop string may still remove."""
        return len(self.tokens) - self._taken[1] if self.finish_reason is None else 0

    def take(self) -> tuple[str, list[int]]:
        """Return the text and tokens that have become final since the last call."""
        characters, tokens = len(self.text), len(self.tokens)
        if self.finish_reason is None:
            characters -= self._withheld()
            tokens = bisect_right(self._ends, characters)
        (old_characters, old_tokens), self._taken = self._taken, (characters, tokens)
        return self.text[old_characters:characters], self.tokens[old_tokens:tokens]

    def _extend(self, text: str) -> None:
        searched = len(self.text)
        self.text += text
        # Tokens that together form one character start and end where the character does.
        self._ends += [len(self.text)] * (len(self.tokens) - len(self._ends))
        self._starts += [searched + _common_length(x, text) for x in self._withheld_before]
        self._withheld_before.clear()
        if len(self.tokens) <= self._least:
            self._uncounted = len(self.text)
        searched = max(searched, self._uncounted)
        matches = []
        for stop in self._stops if len(self.text) > searched else ():
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start))
        if matches:
            # Choose the stop string that ends first, no matter how the text was divided into
            # tokens.
            end = min(matches)[1]
            self.text = self.text[:end]
            del self.tokens[max(bisect_right(self._ends, end), self._least) :]
            self.finish_reason = "stop"

    def _withheld(self) -> int:
        """Return the number of characters at the end of the text that may be the beginning of a
        stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self.text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


def _after_a_letter(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the tokens of a letter, followed by the last tokens of a prompt. The letter is always
    visible, and SentencePiece tokenizers omit a space at the beginning of the visible text."""
    letter = tokenizer.encode("x", add_special_tokens=False)[:CONTEXT]
    last = prompt[len(prompt) - min(len(prompt), CONTEXT - len(letter)) :]
    decode = getattr(tokenizer, "decode", None)  # custom tokenizers may not have it
    return [*letter, *(list(last) if decode is None else whole_characters(decode, list(last)))]


def _common_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two strings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
