"""``/v1/completions``: texts that go on."""

from typing import Any

from kvjax.sampling.scores import MAX_LOGPROBS, TokenScore
from kvjax.serve.echoes import Echo, echo_of
from kvjax.serve.errors import Refused
from kvjax.serve.fields import Fields
from kvjax.serve.form import Scored, in_json
from kvjax.serve.limits import Limits
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.parse_request import Asked

DEFAULT_TOKENS = 16
"""New tokens, as OpenAI has it."""


class Completions:
    """See ``Form``."""

    prefix, whole, part = "cmpl-", "text_completion", "text_completion"

    def __init__(self, lm: Any, limits: Limits, texts: TokenTexts | None) -> None:
        self._lm, self._limits, self._texts = lm, limits, texts

    def read(self, fields: Fields) -> Asked:
        fields.neutral("suffix", "")
        given, echo = self._prompts(fields), fields.flag("echo")
        prompts = [self._limits.encoded(each) if isinstance(each, str) else each for each in given]
        limit = fields.whole("max_tokens", 0)
        if limit == 0 and not echo:
            raise fields.wrong("max_tokens", "at least 1, or 0 with echo: true", limit)
        # One is chosen in any case.
        wanted = None if limit is None else max(limit, 1)
        room = self._limits.new_tokens(prompts, wanted, DEFAULT_TOKENS)
        asked = Asked(prompts=prompts, limit=0 if limit == 0 else room)
        if (count := fields.whole("logprobs", 0, MAX_LOGPROBS)) is not None:
            asked.settings["logprobs"] = count
            if echo:
                asked.settings["prompt_logprobs"] = count
        for name, wanted in (("echo", echo), ("logprobs", count is not None)):
            if wanted and self._texts is None:
                message = f"the model has no tokenizer, which {name} needs: leave it out"
                raise Refused(400, message, param=name)
        if echo:
            asked.echoes = [self._echo(*each) for each in zip(given, prompts, strict=True)]
        return asked

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        try:
            self._lm.check_ids(tokens)
        except ValueError as error:
            raise Refused(400, str(error), param="prompt") from None
        return echo_of(self._lm.tokenizer, prompt, tokens)

    def _prompts(self, fields: Fields) -> list[str | list[int]]:
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
        return some

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
            "token_logprobs": [score and in_json(score.logprob) for _, score, _ in scored],
            "top_logprobs": [score and self._likeliest(token, score) for token, score, _ in scored],
            "text_offset": [start for *_, start in scored],
        }

    def _likeliest(self, token: int, score: TokenScore) -> dict[str, float | None]:
        """The likeliest tokens by their texts, and the chosen one among them. Of tokens that read
        alike the likeliest is reported: the numbers show whether the chosen one is that."""
        assert self._texts is not None
        every = [(token, score.logprob), *reversed(score.likeliest)]
        return {self._texts.of(each)[0]: in_json(logprob) for each, logprob in every}


def _ids(value: Any) -> bool:
    """Whether it is a list of token ids."""
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
