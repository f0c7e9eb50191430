"""``/v1/chat/completions``: answers in a conversation."""

from typing import Any

from kvjax.core.errors import CheckpointError
from kvjax.sampling.scores import MAX_LOGPROBS
from kvjax.serve.errors import Refused
from kvjax.serve.fields import Fields
from kvjax.serve.form import Scored, in_json
from kvjax.serve.limits import Limits
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.parse_request import Asked

_ROLES = {"system", "developer", "user", "assistant"}
_NO_TOOLS = {
    "tools": [[]], "tool_choice": ["none", "auto"], "functions": [[]],
    "function_call": ["none", "auto"], "modalities": [["text"]],
}  # fmt: skip
"""Fields of what is not supported, and their values that ask for nothing."""
_OWN = {"messages", "name", "add_generation_prompt", "continue_final_message"}


class Chat:
    """See ``Form``."""

    prefix, whole, part = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, lm: Any, limits: Limits, texts: TokenTexts | None) -> None:
        self._lm, self._limits, self._texts = lm, limits, texts

    def read(self, fields: Fields) -> Asked:
        for name, values in _NO_TOOLS.items():
            fields.neutral(name, *values)
        fields.drop("parallel_tool_calls", "prediction")
        limits = {name: fields.whole(name, 1) for name in ("max_completion_tokens", "max_tokens")}
        given = {value for value in limits.values() if value is not None}
        if len(given) > 1:
            message = "max_tokens is the older name of max_completion_tokens: give one of them"
            raise Refused(400, message, param="max_tokens")
        prompts = [self._prompt(fields)]
        limit = self._limits.new_tokens(prompts, next(iter(given), None), None)
        asked = Asked(prompts=prompts, limit=limit)
        wanted, count = fields.flag("logprobs"), fields.whole("top_logprobs", 0, MAX_LOGPROBS)
        if count and not wanted:
            raise Refused(400, "top_logprobs is for logprobs: true", param="top_logprobs")
        if wanted:
            asked.settings["logprobs"] = count or 0
        return asked

    def _prompt(self, fields: Fields) -> list[int]:
        value, options = fields.raw("messages"), fields.raw("chat_template_kwargs")
        if not isinstance(value, list) or not value:
            raise fields.wrong("messages", "a list of at least one message", value)
        if not isinstance(options, dict | None) or _OWN & set(options or {}):
            raise fields.wrong("chat_template_kwargs", "an object of a template's own", options)
        messages = [_message(each, f"messages[{at}]") for at, each in enumerate(value)]
        try:
            return self._lm.chat(messages, **_ending(fields), **(options or {}))
        except (ValueError, TypeError, CheckpointError) as error:
            code = None
            if self._lm.tokenizer is None or not self._lm.tokenizer.templates:
                code = "no_chat_template"
            raise Refused(400, str(error), param="messages", code=code) from None

    def choice(self, index: int, text: str, scored: Scored | None, reason: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": index, "message": message, "logprobs": self._logprobs(scored),
            "finish_reason": reason,
        }  # fmt: skip

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(
        self, index: int, text: str, scored: Scored | None, reason: str | None
    ) -> dict[str, Any]:
        delta = {"content": text} if text or reason is None else {}
        return {
            "index": index, "delta": delta, "logprobs": self._logprobs(scored),
            "finish_reason": reason,
        }  # fmt: skip

    def _logprobs(self, scored: Scored | None) -> dict[str, Any] | None:
        if scored is None:
            return None
        content = [
            self._entry(token, score.logprob)
            | {"top_logprobs": [self._entry(*other) for other in score.likeliest]}
            for token, score, _ in scored
            if score is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._texts is not None
        text, raw = self._texts.of(token)
        return {"token": text, "logprob": in_json(logprob), "bytes": raw}


def _ending(fields: Fields) -> dict[str, bool]:
    """What a prompt ends with, where it is not the header of an answer."""
    goes_on = fields.flag("continue_final_message")
    begins = fields.flag("add_generation_prompt", not goes_on)
    if goes_on and begins:
        message = "continue_final_message goes with add_generation_prompt: false"
        raise Refused(400, message, param="continue_final_message")
    if goes_on:
        return {"continue_final_message": True}
    return {} if begins else {"add_generation_prompt": False}


def _message(value: Any, name: str) -> dict[str, str]:
    """A message as templates have it: its content a text."""
    if not isinstance(value, dict):
        raise Refused(400, f"{name} must be an object", param=name)
    fields = Fields(value, f"{name}.")
    role, content = fields.text("role"), fields.raw("content")
    if role not in _ROLES:
        raise fields.wrong("role", f"one of {', '.join(sorted(_ROLES))}", role)
    speaker = fields.text("name")
    fields.drop("refusal", "annotations")
    fields.end()
    if isinstance(content, list):
        content = "".join(_part(each, f"{name}.content[{at}]") for at, each in enumerate(content))
    if not isinstance(content, str):
        raise fields.wrong("content", "a text, or a list of parts", content)
    # Templates know the older name.
    found = {"role": "system" if role == "developer" else role, "content": content}
    return found if speaker is None else found | {"name": speaker}


def _part(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise Refused(400, f"{name} must be an object", param=name)
    fields = Fields(value, f"{name}.")
    kind = fields.text("type")
    if kind != "text":
        raise fields.wrong("type", "text: this server knows no other parts", kind)
    text = fields.text("text")
    fields.end()
    if text is None:
        raise fields.wrong("text", "a text", text)
    return text
