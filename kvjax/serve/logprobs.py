"""Log-probabilities in responses: scored tokens, their texts and bytes, and echoed prompts."""

import functools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvjax.generation.detokenizer import RowText, TokenDecoder
from kvjax.sampling.scores import TokenScore


class ScoredToken(NamedTuple):
    """A token, its score, and its offset in the text in characters.

    The first token of a prompt has no score.
    """

    token: int
    score: TokenScore | None
    offset: int


def scored_tokens(
    tokens: Sequence[int],
    scores: Sequence[TokenScore] | None,
    offsets: Sequence[int],
    end_tokens: Collection[int],
) -> list[ScoredToken]:
    """Combine new tokens with their scores, without end tokens, which are not part of the text."""
    scored = [ScoredToken(*each) for each in zip(tokens, scores or (), offsets, strict=True)]
    return [each for each in scored if each.token not in end_tokens]


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent, which is at least -9999."""
    return max(logprob, -9999.0)


class TokenTexts:
    """The texts and bytes of a tokenizer's single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        byte_level = "ByteLevel" in str(tokenizer.backend.decoder)
        self._byte_of = _byte_level_alphabet() if byte_level else None
        self.lookup = functools.lru_cache(maxsize=65536)(self._lookup)

    def _lookup(self, token: int) -> tuple[str, list[int] | None]:
        """Return a token's text, including a leading space, and its bytes; None if these are
        unknown.

        A token that is only part of a character has U+FFFD as its text.
        """
        once, twice = (
            self._tokenizer.decode([token] * count, skip_special_tokens=False) for count in (1, 2)
        )
        # Decoders strip a leading space from the first token, but not from the second.
        text = twice[len(once) :] if twice.startswith(once) else once
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text, list(text.encode())
        return text, self._bytes(self._tokenizer.backend.id_to_token(token) or "")

    def _bytes(self, name: str) -> list[int] | None:
        """Return the bytes of a token, from its name in the vocabulary; None if they are
        unknown."""
        if match := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return [int(match[1], 16)]
        if self._byte_of is None or not all(letter in self._byte_of for letter in name):
            return None
        return [self._byte_of[letter] for letter in name]


def _byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary encodes (Radford et al., GPT-2,
    2019).

    Letters of printable bytes encode these bytes. The letters from U+0100 on encode the other
    bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + number): byte for number, byte in enumerate(others)}


@dataclass(frozen=True)
class Echo:
    """A prompt that is repeated in its choices, with its text, its tokens, and the offset of each
    token."""

    text: str
    tokens: list[int]
    offsets: list[int]

    def scored(self, scores: Sequence[TokenScore | None]) -> list[ScoredToken]:
        """Return the prompt's tokens with their scores."""
        return [ScoredToken(*each) for each in zip(self.tokens, scores, self.offsets, strict=True)]


def make_echo(tokenizer: Any, prompt: str | list[int], tokens: list[int]) -> Echo:
    """Make the echo of a prompt, which is a text or token ids. Ids are decoded, including special
    tokens."""
    if isinstance(prompt, str):
        return Echo(prompt, tokens, tokenizer.starts(prompt))
    row = RowText(_WithSpecialTokens(tokenizer), ())
    for token in tokens:
        row.push(token)
    row.finish("length")
    return Echo(row.text, tokens, row.starts())


class _WithSpecialTokens:
    """A tokenizer that decodes special tokens to their text."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self._stream = tokenizer.encode, tokenizer.stream

    def stream(self, after: Iterable[int] = (), /) -> TokenDecoder:
        """Return a decoder like ``kvjax.models.text.Tokenizer.stream``, but with the text of
        special tokens."""
        return self._stream(after, skip_special_tokens=False)
