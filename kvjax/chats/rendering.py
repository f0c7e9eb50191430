"""A conversation as text and tokens.

The tokens that the model sampled are kept: a tokenizer may split the same text differently, and
then the cache could not be reused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.core.validation import ArgumentError
from kvjax.policies.model_config import positions_needed

PLAIN = "plain"
"""The template that concatenates texts, for models without a chat template."""
ON_FULL = ("stop", "drop")


@dataclass(frozen=True)
class Turn:
    """A message and its answer.

    ``user``, ``answer``: their texts; a partial answer while it is generated. ``tokens``: the
    answer's, as they were sampled. ``finish_reason``: why it ended, as in
    ``GenerationStats.finish_reasons``; ``"stopped"`` if it was stopped early or by an error; None
    while it is generated. ``attempt``: the number of earlier answers to the same message; it
    changes the seed. ``first``: the index of the oldest turn that the model saw for this answer;
    older turns were dropped.

    Example:
      ```python
      chat = kvjax.Chat(lm, max_new_tokens=8)
      list(chat.send("The json module"))
      print(chat.turns[0].user, chat.turns[0].answer, chat.turns[0].finish_reason)
      ```
    """

    user: str
    answer: str = ""
    tokens: tuple[int, ...] = ()
    finish_reason: str | None = None
    attempt: int = 0
    first: int = 0


Message = Mapping[str, str]


def messages_of(system: str | None, turns: Sequence[Turn], user: str) -> list[Message]:
    """A conversation that ends with a message to answer, as chat templates take it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer})
    return [*messages, {"role": "user", "content": user}]


class Rendering:
    """Renders messages to text and tokens, by a chat template or plainly.

    ``plain``: the system prompt and each answer are followed by an empty line, and each user text
    by its answer directly, for base models that continue a text.
    """

    def __init__(self, tokenizer: Any, template: str | None, options: Mapping[str, object]) -> None:
        """If ``template`` is None, use the checkpoint's template if it has one, else plain text.

        Raises:
          ValueError: if the tokenizer is missing or can't render templates, or an argument has
            the wrong type.
        """
        if tokenizer is None:
            raise ValueError("a chat needs text, but the model has no tokenizer")
        if not isinstance(template, str | None) or template == "":
            raise ArgumentError(
                f"template must be Jinja text or {PLAIN!r}, got {template!r:.80}", param="template"
            )
        if not isinstance(options, Mapping):
            raise ValueError(f"template_options must map names to values, got {options!r:.80}")
        if template is None and hasattr(tokenizer, "render") and not tokenizer.templates:
            template = PLAIN
        self.plain = template == PLAIN
        if not self.plain and not hasattr(tokenizer, "render"):
            raise ValueError(
                f"a {type(tokenizer).__name__} can't render chat templates; use "
                f"template={PLAIN!r}, which concatenates the texts"
            )
        if self.plain and options:
            raise ValueError(
                f"template_options {list(options)} need a template, but this chat has none"
            )
        self._tokenizer, self._template, self._options = tokenizer, template, dict(options)

    def text(self, messages: Sequence[Message]) -> str:
        """The text up to the point where the answer begins. Templates may raise errors."""
        if self.plain:
            ends = ("" if message["role"] == "user" else "\n\n" for message in messages)
            both = zip(messages, ends, strict=True)
            return "".join(message["content"] + end for message, end in both)
        template = {} if self._template is None else {"template": self._template}
        return self._tokenizer.render(messages, **template, **self._options)

    def encode(self, text: str, begins: bool) -> list[int]:
        """The tokens of a text that begins a conversation or continues one. Templates write special
        tokens themselves."""
        if begins:
            return self._tokenizer.encode(text, add_special_tokens=self.plain)
        # Some tokenizers put a space before their input. After another character they don't.
        other = "\n" if text[0].isalnum() else "a"
        before, both = (
            self._tokenizer.encode(part, add_special_tokens=False) for part in (other, other + text)
        )
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)

    def length(self, before: Sequence[int], tokens: Sequence[int], answer: str) -> int | None:
        """The number of characters of ``answer`` that ``tokens`` decode to, or None if they decode
        to another text. If the last character is incomplete, it is not counted."""
        stream = self._tokenizer.stream(before)
        decoded = "".join(map(stream.push, tokens)) + stream.finish()
        return len(decoded) if answer.startswith(decoded) else None


Encode = Callable[[str, bool], list[int]]
"""``(text, begins)``, as ``Rendering.encode``."""


@dataclass(frozen=True)
class TokenizedText:
    """A text, its tokens ``ids``, and ``cuts``, the places after answers where both can be cut: for
    each, the number of the turn, and the numbers of characters and tokens before the cut."""

    text: str = ""
    ids: tuple[int, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()

    def with_cuts_before(self, turn: int) -> "TokenizedText":
        """This text, with only the cuts before a turn."""
        cuts = tuple(cut for cut in self.cuts if cut[0] < turn)
        return TokenizedText(self.text, self.ids, cuts)

    def with_common_cuts(self, text: str) -> "TokenizedText":
        """This text, with only the cuts up to which another text is identical."""
        cuts = tuple(cut for cut in self.cuts if text.startswith(self.text[: cut[1]]))
        return TokenizedText(self.text, self.ids, cuts)

    def tokenize(self, text: str, encode: Encode) -> list[int]:
        """The tokens of another text: the known tokens up to the last cut, then the encoded
        rest."""
        cuts = self.with_common_cuts(text).cuts
        if not cuts:
            return encode(text, True)
        _, characters, count = cuts[-1]
        rest = text[characters:]
        return [*self.ids[:count], *(encode(rest, False) if rest else ())]

    def with_answer(
        self, turn: int, text: str, ids: Sequence[int], answer: str, tokens: Sequence[int]
    ) -> "TokenizedText":
        """A prompt's text and tokens, followed by a turn's answer and its tokens."""
        cuts = self.with_common_cuts(text).cuts
        text, ids = text + answer, (*ids, *tokens)
        return TokenizedText(text, ids, (*cuts, (turn, len(text), len(ids))))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the longest common prefix of two token sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation up to the point where an answer begins: its text, its tokens ``ids``, and the
    first turn in it."""

    text: str
    ids: list[int]
    first: int


def fit_prompt(
    rendering: Rendering,
    tokenized: TokenizedText,
    system: str | None,
    turns: Sequence[Turn],
    user: str,
    *,
    capacity: int | None,
    new: int,
    drop: bool,
) -> ChatPrompt:
    """The prompt for an answer to ``user`` after ``turns``.

    Args:
      rendering: renders it.
      tokenized: text with known tokens.
      system: the system prompt.
      turns: earlier turns.
      user: the message to answer.
      capacity: tokens that the chat can hold, None for no limit.
      new: the most tokens of the answer.
      drop: whether to drop the oldest turns if fewer than ``new`` tokens, or a quarter of the
        capacity, are left. Then turns are dropped until half of the capacity is free, because the
        remaining ones have to be prefilled again, which should be rare.

    Raises:
      ValueError: if the chat is too full for an answer.
    """

    def prompt_from(first: int) -> ChatPrompt:
        text = rendering.text(messages_of(system, turns[first:], user))
        return ChatPrompt(text, tokenized.tokenize(text, rendering.encode), first)

    prompt = prompt_from(turns[-1].first if turns else 0)
    if not prompt.ids:
        raise ValueError("the text is empty; there must be a token to answer")
    if capacity is None:
        return prompt
    if positions_needed(len(prompt.ids), min(new, capacity // 4) if drop else 1) <= capacity:
        return prompt
    while drop and prompt.first < len(turns) and len(prompt.ids) > capacity // 2:
        prompt = prompt_from(prompt.first + 1)
    if len(prompt.ids) <= capacity:
        return prompt
    advice = (
        "all older turns have been dropped already"
        if drop
        else "undo turns, or drop the oldest ones (on_full='drop')"
    )
    raise ValueError(
        f"with this text the chat has {len(prompt.ids)} tokens, but can hold {capacity}: {advice}"
    )
