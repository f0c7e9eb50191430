"""Tokenizers of other libraries, as generation asks for them."""

import inspect
from collections.abc import Iterable
from typing import Any

from kvjax.generation.detokenizer import TextStream


def as_tokenizer(given: Any) -> Any:
    """A tokenizer as generation asks for it; None stays None.

    Raises:
      ValueError: if it has no ``encode`` or ``decode``.
    """
    if given is None or hasattr(given, "stream"):
        return given
    for method in ("encode", "decode"):
        if not callable(getattr(given, method, None)):
            raise ValueError(f"the tokenizer, a {type(given).__name__}, has no {method}")
    return TokenizerAdapter(given)


class TokenizerAdapter:
    """A tokenizer with ``encode(text)`` and ``decode(ids)``, whose keywords ``add_special_tokens``
    and ``skip_special_tokens`` are given where it has them, as those of Transformers have."""

    def __init__(self, given: Any) -> None:
        self.given = given
        self._adds = _has(given.encode, "add_special_tokens")
        self._skips = _has(given.decode, "skip_special_tokens")

    @property
    def pad_token_id(self) -> int | None:
        """What it pads with, if it says."""
        return getattr(self.given, "pad_token_id", None)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        asked = {"add_special_tokens": add_special_tokens} if self._adds else {}
        found = self.given.encode(text, **asked)
        return [int(i) for i in getattr(found, "ids", found)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        asked = {"skip_special_tokens": skip_special_tokens} if self._skips else {}
        return str(self.given.decode([int(i) for i in ids], **asked))

    def stream(self, after: Iterable[int] = (), /) -> TextStream:
        """Text as its tokens come."""
        return TextStream(self.decode, after)


def _has(function: Any, name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # of a compiled module
        return True
