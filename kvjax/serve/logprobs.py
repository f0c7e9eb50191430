"""Texts and bytes of single tokens, for log-probabilities."""

import functools
import re
from typing import Any


class TokenTexts:
    """Of a model's tokens, by its tokenizer, of ``tokenizers``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._letters = _letters() if "ByteLevel" in str(tokenizer.backend.decoder) else None
        self.of = functools.lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, with the space that it may begin with, and its bytes; None where they
        are not known. A part of a character has bytes alone, and U+FFFD as its text."""
        one, two = (self._decoded([token] * count) for count in (1, 2))
        # Behind itself it keeps a space that it would lose at the beginning.
        text = two[len(one) :] if two.startswith(one) else one
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text, list(text.encode())
        return text, self._bytes(self._tokenizer.backend.id_to_token(token) or "")

    def _decoded(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def _bytes(self, name: str) -> list[int] | None:
        if found := re.fullmatch(r"<0x([0-9A-F]{2})>", name):
            return [int(found[1], 16)]
        if self._letters is None or not all(letter in self._letters for letter in name):
            return None
        return [self._letters[letter] for letter in name]


def _letters() -> dict[str, int]:
    """Bytes by the letters that stand for them in byte-level vocabularies (Radford et al., GPT-2,
    2019): printable ones are their own, the others come behind in order."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    found = {chr(byte): byte for byte in own}
    return found | {chr(0x100 + number): byte for number, byte in enumerate(others)}
