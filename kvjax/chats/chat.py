"""Many turns on one cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.chats import saving
from kvjax.chats.answer import Answer
from kvjax.chats.conversation import Conversation, length_for, most_of
from kvjax.chats.rendering import WHEN_FULL, Rendering, Turn
from kvjax.chats.saving import from_told, to_told
from kvjax.core.mesh_context import allow_host_to_device, without_mesh_context
from kvjax.core.validation import INT32_MAX, as_int, as_optional_int, as_python, short_repr
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import DecodingKeywords, explicit_signature
from kvjax.memory.sizes import has_encoder
from kvjax.policies.presets import PolicyChoice, policy


@dataclass(frozen=True)
class ChatStats:
    """Figures of a chat, from its first turn on, those before it was saved among them.

    ``turns``: how many it has; ``dropped``: the oldest ones that the model sees no more.
    ``prefilled``: tokens that were read, of prompts; ``known``: tokens of prompts that were not, as
    the cache had them; ``reread``: of those read, the ones that had been read before, or written,
    and that the cache could not keep (it can't forget just what came after them).
    ``generated``: new tokens. ``prefill_seconds``, ``decode_seconds``, ``compile_seconds``: as of
    ``GenerationStats``.
    ``held``: tokens that the cache holds; ``room``: how many more the chat can have, None where it
    has no end. ``cache_bytes``: of the cache, by place.
    """

    turns: int
    dropped: int
    prefilled: int
    known: int
    reread: int
    generated: int
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    held: int
    room: int | None
    cache_bytes: dict[str, int]


_COUNTED = (
    "prefilled",
    "known",
    "reread",
    "generated",
    "prefill_seconds",
    "decode_seconds",
    "compile_seconds",
)


class Chat:
    """A conversation, turn by turn on one cache: what that holds is not read again.

    Each turn the whole conversation is rendered, and compared with the tokens that the cache holds;
    it is rewound to where they part, and only what is new is read. What the model wrote stays the
    tokens that it drew. A cache that can't be rewound so far (rings, quantized ones and those on
    the host keep their newest tokens alone as they were) is filled again from the start:
    ``stats.reread`` says how often that cost what.

    ``settings``: those of each answer, by name, which may be changed between turns.
    """

    @explicit_signature(DecodingKeywords)
    @allow_host_to_device
    def __init__(
        self,
        lm: LanguageModel,
        *,
        system: str | None = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        cache: PolicyChoice = "static",
        max_len: int | None = None,
        on_full: str = "stop",
        max_new_tokens: int = 512,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        **settings: Unpack[DecodingKeywords],
    ) -> None:
        """Begin a conversation; nothing runs yet.

        Args:
          lm: a model from ``kvjax.models.load``.
          system: the system prompt.
          template: Jinja text of a chat template; by default the checkpoint's. ``"plain"``, the
            default where it has none: a system prompt and each answer, an empty line behind each,
            and what is asked right before its answer, for models that continue texts.
          template_options: what else the template may see, such as ``enable_thinking``.
          cache: a policy or its name, or a list of one policy a layer.
          max_len: tokens that the chat can have; by default those that the model was trained for,
            at most 4,096. Rings have no end.
          on_full: ``"stop"``: a text that there is no room for is refused. ``"drop"``: the oldest
            turns, but not the system prompt, are left out of what the model sees, until half of the
            room is free; what is left is read again.
          max_new_tokens: an answer ends after so many, or where there is no room for more.
          stop: strings before which an answer ends.
          seed: turn ``k``, 0 the first, draws with ``seed + k``, and each retry with 2**32 more: a
            chat that was saved, or edited, draws what it would have drawn otherwise.
          settings: as of ``generate``; penalties and a hook go by the whole conversation.

        Raises:
          ValueError: if an argument is out of its range, the model has an encoder or no tokenizer,
            or its mesh divides rows.
        """
        if has_encoder(lm):
            raise ValueError("a chat goes on with its text, and this model has an encoder for that")
        if isinstance(cache, KVCache):
            raise ValueError("a chat makes its own cache: give a policy or its name")
        if on_full not in WHEN_FULL:
            raise ValueError(f"on_full is {on_full!r}: there are {', '.join(WHEN_FULL)}")
        cache = policy(cache) if isinstance(cache, str) else cache
        self._own = {
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
        length = length_for(lm, max_len)
        rendering = Rendering(lm.tokenizer, template, template_options or {})
        most = most_of(lm, cache, length)
        self._now = Conversation(lm, rendering, cache, length, most)
        # What is wrong with a setting is said now.
        self._now.request([0], cache, seed, self.settings | {"max_new_tokens": 1})

    @classmethod
    @without_mesh_context
    def load(cls, lm: LanguageModel, folder: str | Path, **settings: Any) -> "Chat":
        """Take up a chat that ``save`` wrote, here or elsewhere: it goes on bit for bit.

        Args:
          lm: the same model.
          folder: where it was saved.
          settings: as of ``Chat``, in place of those that were saved; a ``logits_hook``, a
            guide and a draft's model can't be saved, and must be given again. ``max_len`` may be
            larger than it was.

        Raises:
          CheckpointError: if there is no chat, or one of another model; if a file was cut or
            changed.
          ValueError: as of ``Chat``; if another ``cache`` is asked for.
        """
        if "cache" in settings:
            raise ValueError("a chat that was saved has its cache: kvjax.convert changes one")
        told, held = saving.read(folder, lm, settings.get("max_len"))
        given, kept = from_told(folder, told, settings)
        chat = cls(lm, **given)
        now = chat._now
        now.turns, now.known, now.counts = kept
        if held is not None:
            now.held, now.most = held, held.most
        return chat

    @without_mesh_context
    def save(self, folder: str | Path) -> None:
        """Write the chat into a folder: its turns, settings and cache.

        Raises:
          CheckpointError: if something else than a chat stands there.
        """
        self.close()
        now = self._now
        with now.lock:
            own = {"system": self.system, **self._own, **self.settings}
            held = now.held if now.held and now.held.tokens else None
            saving.write(folder, to_told(own, now.turns, now.known, now.counts), held, now.lm)

    def send(self, text: str) -> Answer:
        """Ask, and get the answer as it comes: an iterator over pieces as of ``stream``.

        Raises:
          ValueError: if there is no room for it, or the template refuses it; the chat stays as it
            was.
        """
        with self._now.lock:
            return self._ask(len(self._now.turns), text, 0)

    def edit(self, turn: int, text: str) -> Answer:
        """Go back to before a turn, ``turns[turn]``, and ask another text instead; errors as of
        ``send``."""
        return self._ask(self._number(turn), text, 0)

    def retry(self) -> Answer:
        """Answer the last turn anew, with another seed: where nothing is drawn
        (``temperature=0``) the answer is the same."""
        number = self._number(-1)
        turn = self._now.turns[number]
        return self._ask(number, turn.user, turn.attempt + 1)

    def undo(self) -> Turn:
        """Take the last turn back, and give it.

        Raises:
          ValueError: if there is none.
        """
        with self._now.lock:
            self._number(-1)
            self.close()
            return self._now.turns.pop()

    def close(self) -> None:
        """End the answer that runs, where there is one; it stays as far as it came."""
        self._now.close()

    @property
    def system(self) -> str | None:
        """The system prompt. Where it becomes another one, the conversation is read again."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        self._system = None if text is None else _text("system", text)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns, the oldest first."""
        turns, answer = self._now.turns, self._now.answer
        if answer is None:
            return tuple(turns)
        return (*turns[:-1], replace(turns[-1], answer=answer.text, tokens=tuple(answer.tokens)))

    @property
    def lm(self) -> LanguageModel:
        """The model."""
        return self._now.lm

    @property
    def plain(self) -> bool:
        """Whether there is no chat template."""
        return self._now.rendering.plain

    @property
    def stats(self) -> ChatStats:
        """Its figures; those of an answer that runs are counted at its end."""
        now = self._now
        return ChatStats(
            turns=len(now.turns),
            dropped=now.turns[-1].first if now.turns else 0,
            **{name: now.counts[name] for name in _COUNTED},
            held=len(now.held.tokens) if now.held else 0,
            room=None if now.most is None else max(now.most - now.tokens, 0),
            cache_bytes=dict(nbytes(now.held.cache)) if now.held else {},
        )

    @without_mesh_context
    def _ask(self, number: int, text: str, attempt: int) -> Answer:
        with self._now.lock:
            return self._now.ask(
                number,
                _text("a text that is sent", text),
                attempt,
                system=self.system,
                drop=self._own["on_full"] == "drop",
                seed=self._own["seed"],
                settings=self.settings,
            )

    def _number(self, turn: int) -> int:
        """A turn's number, from the first on, of one that is there."""
        count, turn = len(self._now.turns), as_python(turn)
        if isinstance(turn, bool) or not isinstance(turn, int) or not -count <= turn < count:
            raise ValueError(f"turn {short_repr(turn)}: the chat has {count}, 0 the first")
        return turn % count


def _text(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a text, got {text!r:.80}")
    return text
