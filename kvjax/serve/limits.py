"""How long texts may be, and how many."""

from typing import Any

from kvjax.policies.model_config import new_tokens_for, positions_needed
from kvjax.serve.errors import Refused


class Limits:
    """``longest``: positions of a prompt and its new text together; ``most``: choices at once."""

    def __init__(self, lm: Any, terms: Any, most: int) -> None:
        self._lm, self.most = lm, most
        self.longest = _longest(terms)

    def encoded(self, text: str) -> list[int]:
        """A prompt's tokens.

        Raises:
          Refused: if there is no tokenizer, or the text is none.
        """
        if self._lm.tokenizer is None:
            message = "the model has no tokenizer: give token ids instead of text"
            raise Refused(400, message, param="prompt")
        try:
            return self._lm.tokenizer.encode(text)
        except (ValueError, TypeError) as error:
            raise Refused(400, f"prompt is no text: {error}", param="prompt") from None

    def check_prompts(self, count: int) -> None:
        """Raise ``Refused`` for more prompts than can be taken."""
        if count > self.most:
            message = f"prompt has {count} prompts: this server takes {self.most} at once"
            raise Refused(400, message, param="prompt")

    def new_tokens(self, prompts: list[list[int]], wanted: int | None, default: int | None) -> int:
        """How many new tokens each prompt may have: as many as are wanted, or by default so many,
        or as there is room for.

        Raises:
          Refused: if there is no room for them.
        """
        most = max(map(len, prompts))
        room = new_tokens_for(self.longest, most)
        limit = min(room, default or room) if wanted is None else wanted
        if limit < 1 or limit > room:
            need = positions_needed(most, limit)
            new = f" and {limit} new ones need {need} positions" if limit > 0 else ""
            raise Refused(
                400, f"{most} tokens of prompt{new}: this server has room for {self.longest}",
                param="prompt", code="context_length_exceeded",
            )  # fmt: skip
        return limit


def _longest(terms: Any) -> int:
    """Tokens of the longest text that an engine has positions and pages for."""

    def fits(tokens: int) -> bool:
        return all(
            kind.max_pages(tokens) <= (kind.page_group.layout.pool or 0) for kind in terms.groups
        )

    least, most = 0, terms.max_len
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least
