"""``/v1/completions``: continuations of texts."""

from kvjax.generation.loaded_model import LanguageModel
from kvjax.sampling.scores import MAX_LOGPROBS, TokenScore
from kvjax.serve.json_body import APIError, Fields, JsonObject
from kvjax.serve.logprobs import Echo, ScoredToken, TokenTexts, finite, make_echo
from kvjax.serve.parse_request import ParsedRequest
from kvjax.serve.state import Limits

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for ``max_tokens``."""


class CompletionsSchema:
    """The schema of ``/v1/completions``; see ``EndpointSchema``."""

    prompt_field = "prompt"
    id_prefix, response_type, chunk_type = "cmpl-", "text_completion", "text_completion"

    def __init__(self, lm: LanguageModel, limits: Limits, token_texts: TokenTexts | None) -> None:
        self._lm, self._limits, self._token_texts = lm, limits, token_texts

    def parse(self, fields: Fields) -> ParsedRequest:
        fields.unsupported("suffix", "")
        prompts, echo = self._parse_prompts(fields), fields.flag("echo")
        token_ids = [self._encode(x) if isinstance(x, str) else x for x in prompts]
        max_tokens = fields.integer("max_tokens", 0)
        if max_tokens == 0 and not echo:
            raise fields.error("max_tokens", "at least 1, or 0 with echo: true", max_tokens)
        # The engine generates at least one token, even if only the echo is returned.
        requested = None if max_tokens is None else max(max_tokens, 1)
        limit = self._limits.max_new_tokens(
            token_ids, requested, DEFAULT_MAX_TOKENS, self.prompt_field
        )
        request = ParsedRequest(prompts=token_ids, max_tokens=0 if max_tokens == 0 else limit)
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        if logprobs is not None:
            request.settings["logprobs"] = logprobs
            if echo:
                request.settings["prompt_logprobs"] = logprobs
        for name, requires_tokenizer in (("echo", echo), ("logprobs", logprobs is not None)):
            if requires_tokenizer and self._token_texts is None:
                message = f"{name} needs a tokenizer, which this model does not have"
                raise APIError(400, message, param=name)
        if echo:
            pairs = zip(prompts, token_ids, strict=True)
            request.echoes = [self._echo(prompt, tokens) for prompt, tokens in pairs]
        return request

    def _parse_prompts(self, fields: Fields) -> list[str | list[int]]:
        value = fields.raw("prompt")
        expected = "a string, a list of token ids, or a list of these"
        if value is None:
            raise APIError(400, f"prompt must be {expected}", param="prompt")
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if not isinstance(prompts, list) or not prompts:
            raise fields.error("prompt", expected, value)
        self._limits.check_prompt_count(len(prompts))
        for prompt in prompts:
            if not isinstance(prompt, str) and not _is_token_ids(prompt):
                raise fields.error("prompt", expected, prompt)
        return prompts

    def _encode(self, prompt: str) -> list[int]:
        if self._lm.tokenizer is None:
            message = "the model has no tokenizer: give token ids instead of text"
            raise APIError(400, message, param="prompt")
        try:
            return self._lm.tokenizer.encode(prompt)
        except (ValueError, TypeError) as error:
            message = f"the prompt can't be tokenized: {error}"
            raise APIError(400, message, param="prompt") from None

    def _echo(self, prompt: str | list[int], tokens: list[int]) -> Echo:
        try:
            self._lm.check_ids(tokens)
        except ValueError as error:
            raise APIError(400, str(error), param="prompt") from None
        return make_echo(self._lm.tokenizer, prompt, tokens)

    def choice(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str
    ) -> JsonObject:
        return self.chunk(index, text, scored, finish_reason)

    def first_chunk(self, index: int) -> JsonObject | None:
        return None

    def chunk(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str | None
    ) -> JsonObject:
        logprobs = None if scored is None else self._logprobs(scored)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, scored: list[ScoredToken]) -> JsonObject:
        return {
            "tokens": [self._text(token) for token, _, _ in scored],
            "token_logprobs": [score and finite(score.logprob) for _, score, _ in scored],
            "top_logprobs": [
                score and self._top_logprobs(token, score) for token, score, _ in scored
            ],
            "text_offset": [offset for _, _, offset in scored],
        }

    def _top_logprobs(self, token: int, score: TokenScore) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and of the chosen one, by their
        texts.

        Of several tokens with the same text, only the most likely is reported. Its value shows
        whether it is the chosen token.
        """
        # A later entry with the same text replaces an earlier one, so the most likely comes last.
        entries = [(token, score.logprob), *reversed(score.top_logprobs)]
        return {self._text(each): finite(logprob) for each, logprob in entries}

    def _text(self, token: int) -> str:
        assert self._token_texts is not None
        return self._token_texts.lookup(token)[0]


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)
