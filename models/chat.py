"""Chat templates: Jinja text from a checkpoint, rendered in a sandbox.

A template is a program that someone else wrote. It runs in Jinja's immutable sandbox, and sees
nothing but plain data: strings, numbers, lists and dicts, copied from what the caller gave.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvjax.core.errors import CheckpointError
from kvjax.core.validation import as_bool, as_list, short_repr

from .json_fields import Fields, read_json, read_text

Message = Mapping[str, Any]
_PROBE = "kvjaxprobe"
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Where the text of a conversation is cut. Transformers' own mark, which some templates know; its
space shows whether a template trims."""


class _Refused(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant says, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """The templates of a checkpoint, by name; most have only ``default``."""

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, str], source: str):
        self._texts, self._variables, self._source = dict(texts), dict(variables), source
        self._in_parts: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._texts)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        name: str | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: dicts with ``role`` and ``content``, oldest first. A template of a multimodal
            checkpoint that reads contents in parts alone gets texts as one part.
          add_generation_prompt: end with the header of the answer to come; by default it does,
            unless the last message is continued.
          continue_final_message: end with the content of the last message, so that the model
            goes on with it: without the tokens that end a turn.
          name: which template; by default ``tool_use`` where ``tools`` are given and there is
            one, else ``default``.
          template: the text of another one, in their place.
          **variables: what else the template may see: ``tools``, ``documents``, its own switches.

        Raises:
          ValueError: if there is no template, no message, a message is not plain data with a
            role, or the template refuses them; if the last message is to be continued and is no
            text that the template leaves as it is, or a generation prompt is wanted too.
          CheckpointError: if the template itself is wrong.
        """
        wanted = "a list of at least one message, each a dict"
        some = [] if isinstance(messages, str | Mapping) else as_list("messages", messages, wanted)
        if not some:
            raise ValueError(f"messages must be {wanted}, got {short_repr(messages)}")
        for message in some:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message must be a dict with a role, got {short_repr(message)}")
        # As Transformers: templates know how to miss a key, not how to read None.
        given = [{k: v for k, v in message.items() if v is not None} for message in some]
        try:
            plain = json.loads(json.dumps({"messages": given, **variables}))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages and variables must be plain data: {error}") from error
        ending = as_bool("continue_final_message", continue_final_message)
        if add_generation_prompt is None:
            add_generation_prompt = not ending
        if ending and add_generation_prompt:
            raise ValueError(
                "continue_final_message goes with add_generation_prompt=False: the last message is "
                "continued, or an answer to it begins"
            )
        final = _marked(plain["messages"]) if ending else ""
        text = template or self._choose(name, tools=variables.get("tools") is not None)
        scope = {"tools": None, "documents": None, **self._variables, **plain}
        if self._reads_parts(text, scope):
            scope["messages"] = [_parted(message) for message in scope["messages"]]
        try:
            found = _compile(text).render(scope, add_generation_prompt=add_generation_prompt)
        except _Refused as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{self._source}: the chat template fails: {error}") from error
        except (OverflowError, RecursionError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{self._source}: the chat template fails: {error!r}") from error
        return _cut(found, final) if ending else found

    def _reads_parts(self, text: str, scope: Mapping[str, Any]) -> bool:
        """Whether a template loses a content that is a text, and shows one that is in parts."""
        if text not in self._in_parts:
            message = {"role": "user", "content": _PROBE}
            shown = (
                _shows(text, {**scope, "messages": [each]}) for each in (message, _parted(message))
            )
            self._in_parts[text] = not next(shown) and next(shown)
        return self._in_parts[text]

    def _choose(self, name: str | None, *, tools: bool) -> str:
        if not self._texts:
            raise ValueError(f"{self._source}: this checkpoint has no chat template")
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._texts else "default"
        if name not in self._texts:
            raise ValueError(
                f"there is no chat template {name!r}; there are {', '.join(sorted(self._texts))}"
            )
        return self._texts[name]


def _parted(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _shows(text: str, scope: Mapping[str, Any]) -> bool:
    try:
        return _PROBE in _compile(text).render(scope, add_generation_prompt=True)
    except Exception:  # of whatever kind: then it shows nothing
        return False


def read_templates(folder: Path, config: Fields, variables: Mapping[str, str]) -> ChatTemplates:
    """Read a checkpoint's templates: ``chat_template.jinja`` and its like, which go first, or
    ``chat_template`` of ``tokenizer_config.json``, one text or a list with names, or that of
    ``chat_template.json``, where older multimodal checkpoints have it.

    Raises:
      CheckpointError: if a file can't be read or the field has a wrong form.
    """
    file = folder / "chat_template.jinja"
    texts = {"default": read_text(file)} if file.exists() else {}
    for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        texts[other.stem] = read_text(other)
    if texts:
        return ChatTemplates(texts, variables, str(file))
    older = folder / "chat_template.json"
    if config.raw("chat_template") is None and older.exists():
        config = Fields(older, read_json(older))
    value = config.raw("chat_template")
    if isinstance(value, str):
        texts = {"default": value}
    elif value is not None:
        try:
            texts = {str(entry["name"]): str(entry["template"]) for entry in value}
        except (TypeError, KeyError) as error:
            raise config.wrong("chat_template", "a text, or a list of name and template") from error
    return ChatTemplates(texts, variables, str(config.file))


def _marked(messages: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and give that text."""
    content = messages[-1].get("content")
    holder, key = (messages[-1], "content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        holder, key = content[-1], "text"
    final = holder.get(key)
    if not isinstance(final, str):
        raise ValueError("continue_final_message: the last message has no text to go on with")
    holder[key] = final + _CUT
    return final


def _cut(rendered: str, final: str) -> str:
    """The rendered conversation, up to the mark after the last message's text."""
    end = rendered.rfind(_CUT.rstrip())
    trims = not rendered.startswith(_CUT, end)
    found = rendered[: max(end, 0)]
    if end < 0 or not found.endswith(final) or (trims and final != final.rstrip()):
        raise ValueError(
            "continue_final_message: the chat template strips or changes the last message, "
            f"{final!r:.80}, so the model can't go on with it as it is"
        )
    return found


@functools.lru_cache(maxsize=32)
def _compile(text: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(text)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own, leaves <, > and & as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
