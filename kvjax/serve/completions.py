"""``/v1/completions``: texts that go on."""

from typing import Any

from kvjax.sampling.scores import MOST_SCORES, TokenScore
from kvjax.serve.asked import Asked
from kvjax.serve.fields import Fields
from kvjax.serve.form import Scored, in_json
from kvjax.serve.limits import Limits
from kvjax.serve.refused import Refused
from kvjax.serve.token_texts import TokenTexts

DEFAULT_TOKENS = 16
"""New tokens, as OpenAI has it."""


class Completions:
    """See ``Form``."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, lm: Any, limits: Limits, texts: TokenTexts | None) -> None:
        self._lm, self._limits, self._texts = lm, limits, texts

    def read(self, fields: Fields) -> Asked:
        fields.neutral("echo", False)
        fields.neutral("suffix", "")
        prompts = self._prompts(fields)
        limit = fields.whole("max_tokens", 1)
        asked = Asked(
            prompts=prompts, limit=self._limits.new_tokens(prompts, limit, DEFAULT_TOKENS)
        )
        if (count := fields.whole("logprobs", 0, MOST_SCORES)) is not None:
            asked.settings["logprobs"] = count
        return asked

    def _prompts(self, fields: Fields) -> list[list[int]]:
        value = fields.raw("prompt")
        wanted = "a text, token ids, or a list of such"
        if value is None:
            raise Refused(400, f"prompt must be {wanted}", param="prompt")
        some = [value] if isinstance(value, str) or _ids(value) else value
        if not isinstance(some, list) or not some:
            raise fields.wrong("prompt", wanted, value)
        self._limits.check_prompts(len(some))
        for each in some:
            if not isinstance(each, str) and not _ids(each):
                raise fields.wrong("prompt", wanted, each)
        return [self._limits.encoded(each) if isinstance(each, str) else each for each in some]

    def choice(self, index: int, text: str, scored: Scored | None, reason: str) -> dict[str, Any]:
        return self.piece(index, text, scored, reason)

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(
        self, index: int, text: str, scored: Scored | None, reason: str | None
    ) -> dict[str, Any]:
        logprobs = None if scored is None else self._logprobs(scored)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, scored: Scored) -> dict[str, Any]:
        assert self._texts is not None
        return {
            "tokens": [self._texts.of(token)[0] for token, _, _ in scored],
            "token_logprobs": [in_json(score.logprob) for _, score, _ in scored],
            "top_logprobs": [self._likeliest(token, score) for token, score, _ in scored],
            "text_offset": [start for *_, start in scored],
        }

    def _likeliest(self, token: int, score: TokenScore) -> dict[str, float | None]:
        """The likeliest tokens by their texts, and the chosen one among them. Of tokens that read
        alike the likeliest is told, but for the chosen one."""
        assert self._texts is not None
        every = [*reversed(score.likeliest), (token, score.logprob)]
        return {self._texts.of(each)[0]: in_json(logprob) for each, logprob in every}


def _ids(value: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
