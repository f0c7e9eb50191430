"""Chat templates: Jinja texts of a checkpoint, which are rendered in a sandbox.

Templates are untrusted code. They run in Jinja's immutable sandbox and see only plain data: copies
of the strings, numbers, lists and dicts that the caller passed.
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvjax.core.typing import Json
from kvjax.core.validation import ArgumentError, CheckpointError, as_bool, as_list, short_repr

from .files import Fields, read_json, read_text

Message = Mapping[str, object]
_PROBE = "kvjaxprobe"
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks where the rendered conversation is cut. Transformers uses the same marker, and some
templates check for it. The trailing space shows whether a template strips the message."""


class _Refused(jinja2.TemplateError):
    """A template called ``raise_exception``."""


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks assistant turns for training. It has no effect on
    rendering."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """A checkpoint's chat templates by name. Most checkpoints have only ``default``."""

    def __init__(self, texts: Mapping[str, str], variables: Mapping[str, str], source: str):
        self.texts, self._variables, self._source = dict(texts), dict(variables), source
        self._in_parts: dict[str, bool] = {}

    def __bool__(self) -> bool:
        return bool(self.texts)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        name: str | None = None,
        template: str | None = None,
        **variables: object,
    ) -> str:
        """Render a conversation as text.

        Args:
          messages: dicts with ``role`` and ``content``, oldest first. If the template reads only
            lists of content parts (some multimodal checkpoints), string contents are converted to
            a list with one text part.
          add_generation_prompt: whether to end with the header of the assistant's next message. The
            default is True, unless ``continue_final_message`` is set.
          continue_final_message: whether to end with the content of the last message, without
            end-of-turn tokens, so that the model continues this message.
          name: the template to use. The default is ``tool_use`` if ``tools`` are given and the
            checkpoint has that template, otherwise ``default``.
          template: the text of a template to use instead of the checkpoint's.
          **variables: more variables for the template, such as ``tools`` and ``documents``.

        Raises:
          ValueError: if the checkpoint has no template, ``messages`` is empty, a message is not
            plain data with a role, or the template rejects the messages. With
            ``continue_final_message``, also if the last message has no text, if the template
            changes that text, or if ``add_generation_prompt`` is set.
          CheckpointError: if the template itself is invalid.
        """
        expected = "a list of at least one message, each a dict"
        checked = (
            [] if isinstance(messages, str | Mapping) else as_list("messages", messages, expected)
        )
        if not checked:
            raise ArgumentError(
                f"messages must be {expected}, got {short_repr(messages)}", param="messages"
            )
        for message in checked:
            if not isinstance(message, Mapping) or "role" not in message:
                raise ValueError(f"a message must be a dict with a role, got {short_repr(message)}")
        # As in Transformers, None is treated like a missing key, because templates do not handle
        # None.
        cleaned = [{k: v for k, v in message.items() if v is not None} for message in checked]
        try:
            plain = json.loads(json.dumps({"messages": cleaned, **variables}))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages and variables must be plain data: {error}") from error
        ending = as_bool("continue_final_message", continue_final_message)
        if add_generation_prompt is None:
            add_generation_prompt = not ending
        if ending and add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt can't both be set: pass "
                "add_generation_prompt=False"
            )
        final = _marked(plain["messages"]) if ending else ""
        text = template or self.choose(name, tools=variables.get("tools") is not None)
        scope = {"tools": None, "documents": None, **self._variables, **plain}
        if self._reads_parts(text, scope):
            scope["messages"] = [_parted(message) for message in scope["messages"]]
        try:
            rendered = _compile(text).render(scope, add_generation_prompt=add_generation_prompt)
        except _Refused as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise CheckpointError(f"{self._source}: the chat template fails: {error}") from error
        except (OverflowError, RecursionError, LookupError, AttributeError) as error:
            raise CheckpointError(f"{self._source}: the chat template fails: {error!r}") from error
        return _cut(rendered, final) if ending else rendered

    def _reads_parts(self, text: str, scope: Mapping[str, object]) -> bool:
        """Return whether a template renders a list of content parts but drops a string content."""
        if text not in self._in_parts:
            message = {"role": "user", "content": _PROBE}
            shown = (
                _shows(text, {**scope, "messages": [each]}) for each in (message, _parted(message))
            )
            self._in_parts[text] = not next(shown) and next(shown)
        return self._in_parts[text]

    def choose(self, name: str | None = None, *, tools: bool = False) -> str:
        """The text of the template that ``render`` uses.

        Raises:
          ValueError: if the checkpoint does not have it.
        """
        if not self.texts:
            raise ValueError(f"{self._source}: this checkpoint has no chat template")
        if name is None:
            name = "tool_use" if tools and "tool_use" in self.texts else "default"
        if name not in self.texts:
            raise ValueError(
                f"{self._source}: this checkpoint has no chat template {name!r}; expected one of "
                f"{', '.join(sorted(self.texts))}"
            )
        return self.texts[name]


def _parted(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _shows(text: str, scope: Mapping[str, object]) -> bool:
    try:
        return _PROBE in _compile(text).render(scope, add_generation_prompt=True)
    except Exception:  # a template that fails renders nothing
        return False


def read_templates(folder: Path, config: Fields, variables: Mapping[str, str]) -> ChatTemplates:
    """Read a checkpoint's chat templates.

    Sources, in order of priority: ``chat_template.jinja`` and ``additional_chat_templates/``; the
    field ``chat_template`` in ``tokenizer_config.json``, a string or a list of named templates; the
    same field in ``chat_template.json``, used by older multimodal checkpoints.

    Raises:
      CheckpointError: if a file can't be read or the field has the wrong type.
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
            raise config.wrong(
                "chat_template", "a string, or a list of objects with name and template"
            ) from error
    return ChatTemplates(texts, variables, str(config.file))


def _marked(messages: list[Json]) -> str:
    """Append the marker to the last message's text, and return the text without it."""
    content = messages[-1].get("content")
    holder, key = (messages[-1], "content")
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        holder, key = content[-1], "text"
    final = holder.get(key)
    if not isinstance(final, str):
        raise ValueError("continue_final_message: the last message has no text to continue")
    holder[key] = final + _CUT
    return final


def _cut(rendered: str, final: str) -> str:
    """Return the rendered conversation up to the marker after the last message's text."""
    end = rendered.rfind(_CUT.rstrip())
    trims = not rendered.startswith(_CUT, end)
    rendered = rendered[: max(end, 0)]
    if end < 0 or not rendered.endswith(final) or (trims and final != final.rstrip()):
        raise ValueError(
            "continue_final_message: the chat template strips or changes the last message, "
            f"{final!r:.80}, so the model can't continue it exactly"
        )
    return rendered


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
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert a value to JSON. Unlike Jinja's ``tojson``, this does not escape ``<``, ``>`` and
    ``&``."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
