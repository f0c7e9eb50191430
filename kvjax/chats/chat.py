"""``Chat``: a conversation whose cache is reused from turn to turn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.chats import _saving as saving
from kvjax.chats._conversation import Conversation, cache_capacity, chat_length
from kvjax.chats.answer import Answer
from kvjax.chats.rendering import ON_FULL, Rendering, Turn
from kvjax.core.mesh_context import allow_host_to_device, without_mesh_context
from kvjax.core.validation import (
    INT32_MAX,
    ArgumentError,
    as_int,
    as_optional_int,
    as_python,
    short_repr,
)
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import DecodingKeywords, explicit_signature
from kvjax.memory.sizes import has_encoder
from kvjax.policies.presets import PolicyChoice, policy


@dataclass(frozen=True)
class ChatStats:
    """Statistics of a chat since its first turn, including the time before it was saved and loaded.

    Attributes:
      turns: the number of turns.
      dropped_turns: the number of oldest turns that the model no longer sees.
      prefill_tokens: prompt tokens that were computed.
      cached_tokens: prompt tokens that were already in the cache.
      recomputed_tokens: the part of ``prefill_tokens`` that had been in the cache before, but was
        lost because the cache could not be rewound.
      new_tokens: generated tokens.
      prefill_seconds, decode_seconds, compile_seconds: as in ``GenerationStats``.
      cache_length: tokens in the cache.
      remaining_tokens: how many more tokens fit in the chat; None for no limit.
      cache_bytes: bytes of the cache, by kind of memory.

    Example:
      ```python
      chat = kvjax.Chat(lm, max_new_tokens=8)
      list(chat.send("The json module"))
      print(chat.stats.prefill_tokens, chat.stats.new_tokens, chat.stats.remaining_tokens)
      ```
    """

    turns: int
    dropped_turns: int
    prefill_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    cache_length: int
    remaining_tokens: int | None
    cache_bytes: dict[str, int]


_COUNTED = (
    "prefill_tokens",
    "cached_tokens",
    "recomputed_tokens",
    "new_tokens",
    "prefill_seconds",
    "decode_seconds",
    "compile_seconds",
)


class Chat:
    """A conversation of many turns on one cache.

    In each turn the whole conversation is rendered and compared with the tokens in the cache. The
    cache is rewound to their longest common prefix, and only the rest is prefilled. The tokens of
    earlier answers stay as they were sampled; their text is not tokenized again.

    Rings, quantized caches and caches on the host can only be rewound over their newest tokens. If
    that is not enough, the conversation is prefilled from its start, and
    ``stats.recomputed_tokens`` counts these tokens.

    ``settings`` has the settings of each answer, by name. You may change them between turns.

    Example:
      ```python
      chat = kvjax.Chat(lm, max_new_tokens=8)
      for piece in chat.send("The json module"):
          print(piece.text, end="")
      print(chat.turns)
      ```
    """

    @explicit_signature(DecodingKeywords)
    @allow_host_to_device
    def __init__(
        self,
        lm: LanguageModel,
        *,
        system: str | None = None,
        template: str | None = None,
        template_options: Mapping[str, object] | None = None,
        cache: PolicyChoice = "static",
        max_len: int | None = None,
        on_full: str = "stop",
        max_new_tokens: int = 512,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        **settings: Unpack[DecodingKeywords],
    ) -> None:
        """Start a conversation. No model runs yet.

        Args:
          lm: a model from ``kvjax.models.load``.
          system: the system prompt.
          template: Jinja text of a chat template; by default the checkpoint's template. ``"plain"``
            is for base models that continue texts, and the default if the checkpoint has no
            template. It puts an empty line after the system prompt and after each answer, and each
            user text directly before its answer.
          template_options: further variables of the template, such as ``enable_thinking``.
          cache: a policy, its name, or a list with one for each layer.
          max_len: the maximum number of tokens of the chat. By default it is the length of the
            model's training sequences, but at most 4,096. Rings have no limit.
          on_full: what happens when the chat is full. ``"stop"`` rejects the text. ``"drop"`` frees
            half of the capacity: it hides the oldest turns (but not the system prompt) from the
            model. The remaining turns are prefilled again.
          max_new_tokens: the maximum number of tokens of an answer.
          stop: strings before which an answer ends.
          seed: turn ``k``, counted from 0, samples with the seed ``seed + k``. Each retry adds
            2**32 to it. So a chat that was saved or edited samples the same tokens as one that was
            not.
          settings: settings of ``generate``. Penalties and hooks see the whole conversation.

        Raises:
          ValueError: if an argument is out of range, the model has an encoder or no tokenizer, or
            its mesh splits rows.
        """
        if has_encoder(lm):
            raise ValueError("chats need a decoder-only model, but this one has an encoder")
        if isinstance(cache, KVCache):
            raise ValueError("a chat makes its own cache; give a policy or its name")
        if on_full not in ON_FULL:
            raise ArgumentError(
                f"on_full must be {' or '.join(map(repr, ON_FULL))}, got {on_full!r}",
                param="on_full",
            )
        cache = policy(cache) if isinstance(cache, str) else cache
        self._options = {
            "template": template,
            "template_options": template_options,
            "cache": cache,
            "max_len": as_optional_int("max_len", max_len, 1, INT32_MAX),
            "on_full": on_full,
            "seed": as_int("seed", seed, 0),
        }
        self.settings: dict[str, Any] = {
            "max_new_tokens": as_int("max_new_tokens", max_new_tokens, 1),
            "stop": stop,
            **settings,
        }
        self.system = system
        length = chat_length(lm, max_len)
        rendering = Rendering(lm.tokenizer, template, template_options or {})
        capacity = cache_capacity(lm, cache, length)
        self._conversation = Conversation(lm, rendering, cache, length, capacity)
        # Check the settings now rather than in the first turn.
        self._conversation.request([0], cache, seed, self.settings | {"max_new_tokens": 1})

    @classmethod
    @without_mesh_context
    def load(cls, lm: LanguageModel, folder: str | Path, **settings: Any) -> "Chat":
        """Load a chat that ``save`` wrote. It continues exactly as if it had not been saved.

        Args:
          lm: the same model.
          folder: where it was saved.
          settings: arguments of ``Chat`` that replace the saved ones. A ``logits_hook``, a guide
            and a draft model can't be saved, and must be given again. ``max_len`` may be larger.

        Raises:
          CheckpointError: if the folder contains no chat, the chat belongs to a different model, or
            a file is damaged.
          ValueError: for the same reasons as ``Chat``, or if ``cache`` is given.
        """
        if "cache" in settings:
            raise ValueError("a saved chat has its cache; kvjax.convert changes its policy")
        data, cached = saving.read(folder, lm, settings.get("max_len"))
        arguments, state = saving.from_json(folder, data, settings)
        chat = cls(lm, **arguments)
        conversation = chat._conversation
        conversation.turns, conversation.tokenized, conversation.counts = state
        if cached is not None:
            conversation.cached, conversation.capacity = cached, cached.capacity
        return chat

    @without_mesh_context
    def save(self, folder: str | Path) -> None:
        """Write the chat into a folder: its turns, settings and cache.

        Raises:
          CheckpointError: if the folder contains something other than a chat.
        """
        self.close()
        conversation = self._conversation
        with conversation.lock:
            settings = {"system": self.system, **self._options, **self.settings}
            cached = conversation.cached
            data = saving.to_json(
                settings, conversation.turns, conversation.tokenized, conversation.counts
            )
            saving.write(
                folder, data, cached if cached and cached.tokens else None, conversation.lm
            )

    def send(self, text: str) -> Answer:
        """Send a message. Returns an iterator that generates the answer piece by piece, as
        ``stream`` does.

        Raises:
          ValueError: if the chat is full, or the template rejects the text. The chat is unchanged.
        """
        with self._conversation.lock:
            return self._ask(len(self._conversation.turns), text, 0)

    def edit(self, turn: int, text: str) -> Answer:
        """Send ``text`` instead of the message of ``turns[turn]``, and remove the turns after it.
        Raises the same errors as ``send``."""
        return self._ask(self._turn_index(turn), text, 0)

    def retry(self) -> Answer:
        """Answer the last turn again, with a different seed. Without sampling (``temperature=0``)
        the answer is the same."""
        number = self._turn_index(-1)
        turn = self._conversation.turns[number]
        return self._ask(number, turn.user, turn.attempt + 1)

    def undo(self) -> Turn:
        """Remove the last turn, and return it.

        Raises:
          ValueError: if the chat is empty.
        """
        with self._conversation.lock:
            self._turn_index(-1)
            self.close()
            return self._conversation.turns.pop()

    def close(self) -> None:
        """Stop an unfinished answer. The chat keeps the part that was generated."""
        self._conversation.close()

    @property
    def system(self) -> str | None:
        """The system prompt. After a change the conversation is prefilled again."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = None if text is None else _check_text("system", text)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, oldest first."""
        turns, answer = self._conversation.turns, self._conversation.answer
        if answer is None:
            return tuple(turns)
        return (*turns[:-1], replace(turns[-1], answer=answer.text, tokens=tuple(answer.tokens)))

    @property
    def lm(self) -> LanguageModel:
        """The model."""
        return self._conversation.lm

    @property
    def plain(self) -> bool:
        """Whether the chat has no template."""
        return self._conversation.rendering.plain

    @property
    def stats(self) -> ChatStats:
        """Statistics of the chat. An answer is counted when it ends."""
        conversation = self._conversation
        turns, cached = conversation.turns, conversation.cached
        remaining = None
        if conversation.capacity is not None:
            remaining = max(conversation.capacity - conversation.num_tokens, 0)
        return ChatStats(
            turns=len(turns),
            dropped_turns=turns[-1].first if turns else 0,
            **{name: conversation.counts[name] for name in _COUNTED},
            cache_length=len(cached.tokens) if cached else 0,
            remaining_tokens=remaining,
            cache_bytes=dict(nbytes(cached.cache)) if cached else {},
        )

    @without_mesh_context
    def _ask(self, number: int, text: str, attempt: int) -> Answer:
        with self._conversation.lock:
            return self._conversation.ask(
                number,
                _check_text("a text that is sent", text),
                attempt,
                system=self.system,
                drop=self._options["on_full"] == "drop",
                seed=self._options["seed"],
                settings=self.settings,
            )

    def _turn_index(self, turn: int) -> int:
        """Check the index of a turn, and return it counted from 0. Negative indices count from the
        end."""
        count, turn = len(self._conversation.turns), as_python(turn)
        if isinstance(turn, bool) or not isinstance(turn, int) or not -count <= turn < count:
            raise ValueError(
                f"turn {short_repr(turn)} does not exist: the chat has {count}, counted from 0"
            )
        return turn % count


def _check_text(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise ArgumentError(f"{name} must be a string, got {text!r:.80}", param=name)
    return text
