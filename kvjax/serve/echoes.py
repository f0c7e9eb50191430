"""Prompts that are given back before the text that goes on from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.generation.detokenizer import RowText, TokenDecoder
from kvjax.sampling.scores import TokenScore


@dataclass(frozen=True)
class Echo:
    """A prompt's ``text``, its ``tokens``, and the characters of the text before each."""

    text: str
    tokens: list[int]
    starts: list[int]

    def scored(
        self, scores: Sequence[TokenScore | None]
    ) -> list[tuple[int, TokenScore | None, int]]:
        """The tokens beside their scores and starts."""
        return list(zip(self.tokens, scores, self.starts, strict=True))


def echo_of(tokenizer: Any, prompt: str | list[int], tokens: list[int]) -> Echo:
    """Of a prompt as it was given, and its tokens. Token ids are decoded, special ones too."""
    if isinstance(prompt, str):
        return Echo(prompt, tokens, tokenizer.starts(prompt))
    row = RowText(_Visible(tokenizer), ())
    for token in tokens:
        row.push(token)
    row.finish("length")
    return Echo(row.text, tokens, row.starts())


class _Visible:
    """A tokenizer whose special tokens have their text."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self._stream = tokenizer.encode, tokenizer.stream

    def stream(self, after: Iterable[int] = (), /) -> TokenDecoder:
        """As of ``kvjax.models.text.Tokenizer``."""
        found: TokenDecoder = self._stream(after, skip_special_tokens=False)
        return found
