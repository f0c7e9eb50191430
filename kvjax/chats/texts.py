"""A conversation as text: by a chat template, or plain."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvjax.chats.turns import Turn

PLAIN = "plain"
"""The template of models that have none: texts one behind the other."""

Message = Mapping[str, str]


def messages_of(system: str | None, turns: Sequence[Turn], user: str) -> list[Message]:
    """A conversation as templates have it, up to a text that is to be answered."""
    found = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        found.append({"role": "user", "content": turn.user})
        found.append({"role": "assistant", "content": turn.answer})
    return [*found, {"role": "user", "content": user}]


class Rendering:
    """How messages become text and tokens.

    ``plain``: a system prompt and each answer, and an empty line behind each of them; what is asked
    stands right before its answer, which goes on with it. That is for models which continue texts.
    """

    def __init__(self, tokenizer: Any, template: str | None, options: Mapping[str, Any]) -> None:
        """Choose: the checkpoint's template where ``template`` is None and it has one.

        Raises:
          ValueError: if there is no tokenizer, or it can't render a template.
        """
        if tokenizer is None:
            raise ValueError("a chat is text, and the model has no tokenizer")
        if not isinstance(template, str | None) or template == "":
            raise ValueError(f"template must be Jinja text or {PLAIN!r}, got {template!r:.80}")
        if not isinstance(options, Mapping):
            raise ValueError(f"template_options must map names to values, got {options!r:.80}")
        if template is None and hasattr(tokenizer, "render") and not tokenizer.templates:
            template = PLAIN
        self.plain = template == PLAIN
        if not self.plain and not hasattr(tokenizer, "render"):
            raise ValueError(
                f"the tokenizer, a {type(tokenizer).__name__}, renders no chat template: "
                f"template={PLAIN!r} puts texts one behind the other"
            )
        if self.plain and options:
            raise ValueError(f"a chat without a template has no options for it: {list(options)}")
        self._tokenizer, self._template, self._options = tokenizer, template, dict(options)

    def text(self, messages: Sequence[Message]) -> str:
        """The text of a conversation, up to where the answer begins; errors as of the template."""
        if self.plain:
            ends = ("" if message["role"] == "user" else "\n\n" for message in messages)
            both = zip(messages, ends, strict=True)
            return "".join(message["content"] + end for message, end in both)
        more = {} if self._template is None else {"template": self._template}
        return self._tokenizer.render(messages, **more, **self._options)

    def encode(self, text: str, begins: bool) -> list[int]:
        """A text's tokens; a template writes the special ones itself."""
        if begins:
            return self._tokenizer.encode(text, add_special_tokens=self.plain)
        # Some tokenizers put a space before whatever they are given: behind another character it
        # does not come about.
        other = "\n" if text[0].isalnum() else "a"
        before, whole = (
            self._tokenizer.encode(each, add_special_tokens=False) for each in (other, other + text)
        )
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)

    def length(self, before: Sequence[int], tokens: Sequence[int], answer: str) -> int | None:
        """Characters of ``answer`` that ``tokens`` make, or None where they make another text: of
        one that ends inside a token they lack a few."""
        stream = self._tokenizer.stream(before)
        made = "".join(map(stream.push, tokens)) + stream.finish()
        return len(made) if answer.startswith(made) else None
