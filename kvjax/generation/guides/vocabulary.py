"""A model's tokens, as llguidance is given them."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any


class Vocabulary:
    """Tokens of a tokenizer, as many as the model has logits for.

    llguidance asks it how a text that must come is split into tokens. The names of special tokens
    are spelled with ordinary tokens there: a special token has no text, and may end a generation.

    ``tokens``: the bytes of each, none of those that the tokenizer does not know;
    ``special_token_ids``: those that are special.
    """

    bos_token_id = None

    def __init__(self, whole: Any, size: int, ends: Sequence[int]) -> None:
        """``whole``: llguidance's own reading of the tokenizer; ``size``: how many tokens the model
        has; ``ends``: tokens that end a text."""
        self._whole, self._size, self.eos_token_id = whole, size, ends[0]
        known = range(min(size, whole.vocab_size))
        self.tokens = [whole.decode_bytes([token]) for token in known]
        self.tokens += [b""] * (size - len(self.tokens))
        self.special_token_ids = [x for x in known if whole.is_special_token(x) or x in ends]
        self._special = frozenset(self.special_token_ids)

    def __call__(self, text: str) -> list[int]:
        """The ordinary tokens of a text."""
        if not isinstance(text, str):
            raise TypeError("a vocabulary splits str, not bytes")
        split, whole = self._whole.tokenize_str(text), text.encode()
        if b"".join(self._whole.decode_bytes([token]) for token in split) != whole:
            return self._spelled(whole)  # the tokenizer changes it: ▁ is a space, ﬁ two letters
        found: list[int] = []
        for token in split:
            usual = token < self._size and token not in self._special
            found += [token] if usual else self._spelled(self._whole.decode_bytes([token]))
        return found

    def _spelled(self, text: bytes) -> list[int]:
        """Bytes by the longest ordinary tokens, as far as there are any."""
        found, start = [], 0
        while start < len(text):
            for stop in range(min(len(text), start + self._longest), start, -1):
                if (token := self._ordinary.get(text[start:stop])) is not None:
                    found.append(token)
                    start = stop
                    break
            else:
                break
        return found

    @cached_property
    def _ordinary(self) -> dict[bytes, int]:
        usual = (pair for pair in enumerate(self.tokens) if pair[0] not in self._special)
        return {text: token for token, text in usual if text}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ordinary), default=0)
