"""Text from tokens as they are generated: whole characters, up to stop strings."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8
"""Tokens before the first that are decoded with it."""
_MAX_PENDING = 64
"""Tokens after which text is given though it ends in an incomplete character."""


def whole_characters(decode: Callable[[list[int]], str], tokens: list[int]) -> list[int]:
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
        self._before = whole_characters(decode, before) or before
        self._pending: list[int] = []
        self.held = ""
        """The text that is held back, which later tokens may change."""

    def push(self, token: int) -> str:
        """Take one token; the text that it completes, "" where there is none."""
        self._pending.append(int(token))
        text = self._new_text()
        incomplete = text.endswith(_REPLACEMENT) and len(self._pending) < _MAX_PENDING
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


class TokenDecoder(Protocol):
    """Decodes one token at a time: see ``kvjax.models.text.TextStream``."""

    def push(self, token: int, /) -> str: ...
    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """What generation asks of a tokenizer: see ``kvjax.models.text.Tokenizer``."""

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def stream(self, after: Iterable[int] = (), /) -> TokenDecoder: ...


class RowText:
    """The new tokens and the text of one row, up to where a stop string begins.

    ``tokens`` and ``text`` are what the row has so far, ``reason`` is why it has ended. ``take``
    gives, piece by piece, the part that nothing can take back.
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
        """``least``: new tokens after which stop strings count; a stop string may begin before, and
        these tokens stay even so. ``guided``: a leading space is text, though nothing else shows
        before it, because a guide is kept to by every character."""
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self._stops, self._least, self._uncounted = stops, least, 0
        self._stream: TokenDecoder | None = None
        if tokenizer is not None:
            before = _behind_a_letter(tokenizer, prompt) if guided else prompt
            self._stream = tokenizer.stream(before)
        # Characters of text before and with each token, where they are known; before the others
        # what was held back.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._held_before: list[str] = []
        self._taken = (0, 0)

    def push(self, token: int) -> None:
        """Take a token, unless the text has ended."""
        if self.reason is None:
            self._held_before.append(getattr(self._stream, "held", ""))
            self.tokens.append(token)
            text = "" if self._stream is None else self._stream.push(token)
            if text or self._stream is None:
                self._extend(text)

    def finish(self, reason: str) -> None:
        """End the text for ``reason``, unless it has ended."""
        if self.reason is None:
            self._extend("" if self._stream is None else self._stream.finish())
        if self.reason is None:
            self.reason = reason

    def cut(self) -> None:
        """End the text where ``take`` has left it, unless it has ended."""
        if self.reason is None:
            characters, tokens = self._taken
            self.text = self.text[:characters]
            del self.tokens[tokens:]
            self.reason = "stopped"

    def starts(self, first: int = 0) -> list[int]:
        """Where in ``text`` each token begins, from token number ``first`` on, as far as that is
        known. Tokens behind the place where a stop string has cut the text begin at its end."""
        return [min(start, len(self.text)) for start in self._starts[first : len(self.tokens)]]

    @property
    def num_taken(self) -> int:
        """Tokens that ``take`` has given."""
        return self._taken[1]

    @property
    def pending(self) -> int:
        """Tokens that a stop string may yet take back."""
        return len(self.tokens) - self._taken[1] if self.reason is None else 0

    def take(self) -> tuple[str, list[int]]:
        """What has become certain since the last call: text and tokens."""
        characters, tokens = len(self.text), len(self.tokens)
        if self.reason is None:
            characters -= self._held()
            tokens = bisect_right(self._ends, characters)
        (old_characters, old_tokens), self._taken = self._taken, (characters, tokens)
        return self.text[old_characters:characters], self.tokens[old_tokens:tokens]

    def _extend(self, text: str) -> None:
        searched = len(self.text)
        self.text += text
        # Tokens that make one character together begin and end where it does.
        self._ends += [len(self.text)] * (len(self.tokens) - len(self._ends))
        self._starts += [searched + _in_common(x, text) for x in self._held_before]
        self._held_before.clear()
        if len(self.tokens) <= self._least:
            self._uncounted = len(self.text)
        searched = max(searched, self._uncounted)
        found = []
        for stop in self._stops if len(self.text) > searched else ():
            start = self.text.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            # The one that is complete first, however the tokens cut the text.
            end = min(found)[1]
            self.text = self.text[:end]
            del self.tokens[max(bisect_right(self._ends, end), self._least) :]
            self.reason = "stop"

    def _held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(self.text))
        for length in range(longest, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


def _behind_a_letter(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt behind a letter, which shows where they do not: sentencepiece
    tokenizers leave a space out at the beginning of what shows."""
    letter = tokenizer.encode("x", add_special_tokens=False)[:CONTEXT]
    last = prompt[len(prompt) - min(len(prompt), CONTEXT - len(letter)) :]
    decode = getattr(tokenizer, "decode", None)  # which a user's tokenizer may lack
    return [*letter, *(list(last) if decode is None else whole_characters(decode, list(last)))]


def _in_common(one: str, other: str) -> int:
    """Characters that both begin with."""
    both = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, its) in both if mine != its), min(len(one), len(other)))
