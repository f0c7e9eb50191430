"""A conversation as text and tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.policies.model_config import positions_needed


@dataclass(frozen=True)
class Turn:
    """What was asked, and what was answered.

    ``user``, ``answer``: their texts, the answer as far as it came; ``tokens``: the answer's, as
    they were drawn; ``reason``: why it ended, as ``GenerationStats.stop_reasons``, ``"stopped"``
    where it was stopped half way or an error ended it; None while it runs.
    ``attempt``: how often it was answered before, by which its seed goes; ``first``: the first turn
    that the model saw with it, where older ones were dropped.
    """

    user: str
    answer: str = ""
    tokens: tuple[int, ...] = ()
    reason: str | None = None
    attempt: int = 0
    first: int = 0


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


Encode = Callable[[str, bool], list[int]]
"""A text's tokens; and whether it begins a text, or goes on with one."""


@dataclass(frozen=True)
class Known:
    """``text``, its tokens ``ids``, and ``marks`` where both may be cut, behind answers: the number
    of the turn, and how many characters and tokens there are up to there."""

    text: str = ""
    ids: tuple[int, ...] = ()
    marks: tuple[tuple[int, int, int], ...] = ()

    def before(self, turn: int) -> "Known":
        """What is known of the turns before one."""
        return Known(self.text, self.ids, tuple(mark for mark in self.marks if mark[0] < turn))

    def of(self, text: str) -> "Known":
        """What is known of another text: of its beginning."""
        fits = [mark for mark in self.marks if text.startswith(self.text[: mark[1]])]
        return Known(self.text, self.ids, tuple(fits))

    def tokens(self, text: str, encode: Encode) -> list[int]:
        """The tokens of a text: those that are known, and behind them what ``encode`` gives."""
        fits = self.of(text).marks
        if not fits:
            return encode(text, True)
        _, characters, count = fits[-1]
        rest = text[characters:]
        return [*self.ids[:count], *(encode(rest, False) if rest else ())]

    def answered(
        self, turn: int, text: str, ids: Sequence[int], answer: str, tokens: Sequence[int]
    ) -> "Known":
        """With a turn more: what was asked, its tokens, and what was answered, as far as ``tokens``
        make it."""
        marks = self.of(text).marks
        text, ids = text + answer, (*ids, *tokens)
        return Known(text, ids, (*marks, (turn, len(text), len(ids))))


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


WHEN_FULL = ("stop", "drop")


@dataclass(frozen=True)
class Plan:
    """A conversation up to where an answer begins: its ``text``, its tokens ``ids``, and which turn
    is the ``first`` in it."""

    text: str
    ids: list[int]
    first: int


def planned(
    rendering: Rendering,
    known: Known,
    system: str | None,
    turns: Sequence[Turn],
    user: str,
    *,
    most: int | None,
    new: int,
    drop: bool,
) -> Plan:
    """What is to be read for an answer to ``user`` behind ``turns``.

    ``most``: tokens that there is room for; ``new``: those that the answer may have. Where ``drop``
    lets old turns go, they do when that, or a quarter of the room, is not left, and then until half
    of it is: what stands behind them must be read again, which should be seldom.

    Raises:
      ValueError: if there is no room for an answer.
    """

    def plan(first: int) -> Plan:
        text = rendering.text(messages_of(system, turns[first:], user))
        return Plan(text, known.tokens(text, rendering.encode), first)

    found = plan(turns[-1].first if turns else 0)
    if not found.ids:
        raise ValueError("the text is empty: there is no token to answer to")
    if most is None:
        return found
    if positions_needed(len(found.ids), min(new, most // 4) if drop else 1) <= most:
        return found
    while drop and found.first < len(turns) and len(found.ids) > most // 2:
        found = plan(found.first + 1)
    if len(found.ids) <= most:
        return found
    full = f"the chat comes to {len(found.ids)} tokens with this text, and has room for {most}: "
    if drop:
        raise ValueError(full + "all older turns were left out already")
    raise ValueError(full + "take turns back, or let the oldest ones go (on_full='drop')")
