"""A conversation as text and tokens.

The tokens that the model sampled are kept. A tokenizer may split the same text differently, and
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

    Attributes:
      user: the text of the message.
      answer: the text of the answer. It is partial while the answer is generated.
      tokens: the tokens of the answer, as they were sampled.
      finish_reason: why the answer ended, as in ``GenerationStats.finish_reasons``; ``"stopped"``
        if it was stopped early or by an error; None while it is generated.
      attempt: the number of earlier answers to the same message, which changes the seed.
      first: the index of the oldest turn that the model saw for this answer. Older turns were
        dropped.

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
    """Convert a conversation that ends with the message ``user`` to the messages that chat
    templates expect."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer})
    return [*messages, {"role": "user", "content": user}]


class Rendering:
    """Renders messages to text and tokens, with a chat template or plainly.

    ``plain`` says that there is no template, for base models that continue a text: an empty line
    follows the system prompt and each answer, and each answer directly follows the user's text.
    """

    def __init__(self, tokenizer: Any, template: str | None, options: Mapping[str, object]) -> None:
        """Create a rendering. If ``template`` is None, it uses the checkpoint's template if there
        is one, otherwise plain text.

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
        """Render messages to the text up to the point where the answer begins. Templates may raise
        errors."""
        if self.plain:
            ends = ("" if message["role"] == "user" else "\n\n" for message in messages)
            both = zip(messages, ends, strict=True)
            return "".join(message["content"] + end for message, end in both)
        template = {} if self._template is None else {"template": self._template}
        return self._tokenizer.render(messages, **template, **self._options)

    def encode(self, text: str, begins: bool) -> list[int]:
        """Tokenize a text that begins a conversation (``begins``) or continues one. Templates write
        special tokens themselves."""
        if begins:
            return self._tokenizer.encode(text, add_special_tokens=self.plain)
        # Some tokenizers put a space before their input, but not before a character inside it.
        other = "\n" if text[0].isalnum() else "a"
        before, both = (
            self._tokenizer.encode(part, add_special_tokens=False) for part in (other, other + text)
        )
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokenizer.encode(text, add_special_tokens=False)

    def length(self, before: Sequence[int], tokens: Sequence[int], answer: str) -> int | None:
        """Return the number of characters of ``answer`` to which ``tokens`` decode. An incomplete
        last character is not counted. Returns None if the tokens decode to a different text."""
        stream = self._tokenizer.stream(before)
        decoded = "".join(map(stream.push, tokens)) + stream.finish()
        return len(decoded) if answer.startswith(decoded) else None


Encode = Callable[[str, bool], list[int]]
"""A function ``(text, begins)`` like ``Rendering.encode``."""


@dataclass(frozen=True)
class TokenizedText:
    """A text and its tokens ``ids``.

    ``cuts`` lists the places after answers where both can be cut. Each entry has the index of the
    turn, the number of characters before the cut, and the number of tokens before it.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()

    def with_cuts_before(self, turn: int) -> "TokenizedText":
        """Return this text with only the cuts before a turn."""
        cuts = tuple(cut for cut in self.cuts if cut[0] < turn)
        return TokenizedText(self.text, self.ids, cuts)

    def with_common_cuts(self, text: str) -> "TokenizedText":
        """Return this object with only those cuts up to which its text and ``text`` are the
        same."""
        cuts = tuple(cut for cut in self.cuts if text.startswith(self.text[: cut[1]]))
        return TokenizedText(self.text, self.ids, cuts)

    def tokenize(self, text: str, encode: Encode) -> list[int]:
        """Tokenize ``text``. The known tokens are used up to the last of the ``cuts`` before which
        both texts are the same. Only the text after this cut is encoded."""
        cuts = self.with_common_cuts(text).cuts
        if not cuts:
            return encode(text, True)
        _, characters, count = cuts[-1]
        rest = text[characters:]
        return [*self.ids[:count], *(encode(rest, False) if rest else ())]

    def with_answer(
        self, turn: int, text: str, ids: Sequence[int], answer: str, tokens: Sequence[int]
    ) -> "TokenizedText":
        """Return the text ``text`` and tokens ``ids`` of a prompt, followed by a turn's answer and
        its tokens."""
        cuts = self.with_common_cuts(text).cuts
        text, ids = text + answer, (*ids, *tokens)
        return TokenizedText(text, ids, (*cuts, (turn, len(text), len(ids))))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation up to the point where an answer begins.

    It has the text, the tokens ``ids``, and the index ``first`` of the first turn that it contains.
    """

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
    """Make the prompt for an answer to ``user`` after ``turns``.

    Args:
      rendering: renders the prompt.
      tokenized: earlier text whose tokens are known.
      system: the system prompt.
      turns: earlier turns.
      user: the message to answer.
      capacity: the maximum number of tokens of the chat; None for no limit.
      new: the maximum number of tokens of the answer.
      drop: whether to drop the oldest turns if the space that is left is too small both for ``new``
        tokens and for a quarter of the capacity. Turns are then dropped until half of the capacity
        is free. The remaining turns must be prefilled again, so this should be rare.

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
