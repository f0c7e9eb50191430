"""``/v1/chat/completions``: answers in a conversation."""

from kvjax.core.validation import CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.sampling.scores import MAX_LOGPROBS
from kvjax.serve.json_body import APIError, Fields, JsonObject
from kvjax.serve.logprobs import ScoredToken, TokenTexts, finite
from kvjax.serve.parse_request import ParsedRequest
from kvjax.serve.state import Limits

_ROLES = {"system", "developer", "user", "assistant"}
_UNSUPPORTED = {
    "tools": [[]],
    "tool_choice": ["none", "auto"],
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
}
"""Unsupported fields, each with the values for which it has no effect."""
_RESERVED_TEMPLATE_ARGUMENTS = {
    "messages",
    "name",
    "add_generation_prompt",
    "continue_final_message",
}


class ChatSchema:
    """The schema of ``/v1/chat/completions``; see ``EndpointSchema``."""

    prompt_field = "messages"
    id_prefix, response_type, chunk_type = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, lm: LanguageModel, limits: Limits, token_texts: TokenTexts | None) -> None:
        self._lm, self._limits, self._token_texts = lm, limits, token_texts

    def parse(self, fields: Fields) -> ParsedRequest:
        for name, neutral in _UNSUPPORTED.items():
            fields.unsupported(name, *neutral)
        fields.ignore("parallel_tool_calls", "prediction")
        limits = {fields.integer(name, 1) for name in ("max_completion_tokens", "max_tokens")}
        limits.discard(None)
        if len(limits) > 1:
            message = "max_tokens and max_completion_tokens differ: give only one of them"
            raise APIError(400, message, param="max_tokens")
        prompts = [self._parse_messages(fields)]
        requested = limits.pop() if limits else None
        max_tokens = self._limits.max_new_tokens(prompts, requested, None, self.prompt_field)
        request = ParsedRequest(prompts=prompts, max_tokens=max_tokens)
        logprobs = fields.flag("logprobs")
        top_logprobs = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
        if top_logprobs and not logprobs:
            raise APIError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        if logprobs:
            request.settings["logprobs"] = top_logprobs or 0
        return request

    def _parse_messages(self, fields: Fields) -> list[int]:
        """Convert the conversation to token ids, with the model's chat template."""
        value, arguments = fields.raw("messages"), fields.raw("chat_template_kwargs")
        if not isinstance(value, list) or not value:
            raise fields.error("messages", "a list of at least one message", value)
        if not isinstance(arguments, dict | None) or _RESERVED_TEMPLATE_ARGUMENTS & set(
            arguments or {}
        ):
            expected = f"an object without {', '.join(sorted(_RESERVED_TEMPLATE_ARGUMENTS))}"
            raise fields.error("chat_template_kwargs", expected, arguments)
        messages = [_parse_message(x, f"messages[{index}]") for index, x in enumerate(value)]
        try:
            return self._lm.chat(messages, **_prompt_ending(fields), **(arguments or {}))
        except (ValueError, TypeError, CheckpointError) as error:
            code = None
            if self._lm.tokenizer is None or not self._lm.tokenizer.templates:
                code = "no_chat_template"
            raise APIError(400, str(error), param="messages", code=code) from None

    def choice(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str
    ) -> JsonObject:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(scored),
            "finish_reason": finish_reason,
        }

    def first_chunk(self, index: int) -> JsonObject | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(
        self, index: int, text: str, scored: list[ScoredToken] | None, finish_reason: str | None
    ) -> JsonObject:
        return {
            "index": index,
            "delta": {"content": text} if text or finish_reason is None else {},
            "logprobs": self._logprobs(scored),
            "finish_reason": finish_reason,
        }

    def _logprobs(self, scored: list[ScoredToken] | None) -> JsonObject | None:
        if scored is None:
            return None
        content = [
            self._logprob(token, score.logprob)
            | {"top_logprobs": [self._logprob(*other) for other in score.top_logprobs]}
            for token, score, _ in scored
            if score is not None
        ]
        return {"content": content, "refusal": None}

    def _logprob(self, token: int, logprob: float) -> JsonObject:
        assert self._token_texts is not None
        text, raw = self._token_texts.lookup(token)
        return {"token": text, "logprob": finite(logprob), "bytes": raw}


def _prompt_ending(fields: Fields) -> dict[str, bool]:
    """Return the template arguments for the end of the prompt.

    By default the prompt ends with the header of the assistant's answer.
    """
    continued = fields.flag("continue_final_message")
    header = fields.flag("add_generation_prompt", not continued)
    if continued and header:
        message = "continue_final_message needs add_generation_prompt: false"
        raise APIError(400, message, param="continue_final_message")
    if continued:
        return {"continue_final_message": True}
    return {} if header else {"add_generation_prompt": False}


def _parse_message(value: object, name: str) -> dict[str, str]:
    """Parse a message for a chat template, which expects the content as one string."""
    fields = _parse_object(value, name)
    role, content, speaker = fields.text("role"), fields.raw("content"), fields.text("name")
    if role not in _ROLES:
        raise fields.error("role", f"one of {', '.join(sorted(_ROLES))}", role)
    fields.ignore("refusal", "annotations")
    fields.reject_unknown()
    if isinstance(content, list):
        parts = (_parse_part(x, f"{name}.content[{index}]") for index, x in enumerate(content))
        content = "".join(parts)
    if not isinstance(content, str):
        raise fields.error("content", "a string or a list of parts", content)
    # Templates know the role "developer" only by its older name "system".
    message = {"role": "system" if role == "developer" else role, "content": content}
    return message if speaker is None else message | {"name": speaker}


def _parse_part(value: object, name: str) -> str:
    """Return the text of one part of a message's content."""
    fields = _parse_object(value, name)
    kind = fields.text("type")
    if kind != "text":
        raise fields.error("type", "text, the only supported type", kind)
    text = fields.text("text")
    fields.reject_unknown()
    if text is None:
        raise fields.error("text", "a string", text)
    return text


def _parse_object(value: object, name: str) -> Fields:
    if not isinstance(value, dict):
        raise APIError(400, f"{name} must be an object", param=name)
    return Fields(value, f"{name}.")
