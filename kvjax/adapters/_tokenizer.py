"""Tokenizers of other libraries, with the interface that generation needs."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kvjax.generation.detokenizer import TextStream


def as_tokenizer(tokenizer: Any) -> Any:
    """Adapt a tokenizer for generation; None and tokenizers of kvjax are returned unchanged.

    Raises:
      ValueError: if the tokenizer has no ``encode`` or ``decode``.
    """
    if tokenizer is None or hasattr(tokenizer, "stream"):
        return tokenizer
    for method in ("encode", "decode"):
        if not callable(getattr(tokenizer, method, None)):
            raise ValueError(f"the tokenizer, a {type(tokenizer).__name__}, has no {method}")
    return TokenizerAdapter(tokenizer)


class TokenizerAdapter:
    """A tokenizer with ``encode(text)`` and ``decode(ids)``.

    The keywords ``add_special_tokens`` and ``skip_special_tokens`` are passed on if the tokenizer
    has them, as Transformers' tokenizers do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._has_add = _has_parameter(tokenizer.encode, "add_special_tokens")
        self._has_skip = _has_parameter(tokenizer.decode, "skip_special_tokens")

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's padding token, if it has one."""
        return getattr(self.tokenizer, "pad_token_id", None)

    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        options = {"add_special_tokens": add_special_tokens} if self._has_add else {}
        encoding = self.tokenizer.encode(text, **options)
        return [int(i) for i in getattr(encoding, "ids", encoding)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens} if self._has_skip else {}
        return str(self.tokenizer.decode([int(i) for i in ids], **options))

    def stream(self, after: Iterable[int] = (), /) -> TextStream:
        """A decoder that returns text as tokens arrive."""
        return TextStream(self.decode, after)


def _has_parameter(function: Callable[..., object], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except ValueError:  # functions of compiled modules have no signature
        return True
