"""A conversation: its turns, their tokens and its cache."""

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.chats.answer import Answer
from kvjax.chats.rendering import Known, Plan, Rendering, Turn, common, planned
from kvjax.core.transfer import fetch
from kvjax.core.validation import as_int, as_python
from kvjax.generation.cache_choice import limit_memory
from kvjax.generation.capacity import capacity_bucket, max_capacity
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.options import CacheChoice, DecodingKeywords, GenerationOptions
from kvjax.generation.request import GenerationRequest, prepare_request
from kvjax.generation.results import GenerationResult
from kvjax.generation.streaming import Stream
from kvjax.layouts import UNLIMITED
from kvjax.memory.sizes import abstract_cache
from kvjax.operations.rows import reset, rewind, rewindable
from kvjax.placement.mesh import shard_over
from kvjax.policies.model_config import common_heads, new_tokens_for, trained_context
from kvjax.policies.presets import PolicyChoice

_LENGTH = 4096
"""Tokens that a chat can have, unless somebody says otherwise."""


@dataclass(frozen=True)
class Held:
    """A cache of one row, and the tokens that it holds."""

    cache: KVCache
    tokens: tuple[int, ...] = ()

    def back_to(self, ids: Sequence[int]) -> tuple["Held", int]:
        """What ``ids`` can be gone on from, one token of them at least being left to be read; and
        how many tokens that were held with them must be read again, as the cache can't be rewound
        so far."""
        same = min(common(self.tokens, ids), len(ids) - 1)
        surplus = len(self.tokens) - same
        if not surplus:
            return self, 0
        if surplus > fetch(rewindable(self.cache))[0]:
            return Held(reset(self.cache)), same
        return Held(rewind(self.cache, surplus), self.tokens[:same]), 0

    @property
    def most(self) -> int | None:
        """Tokens that it can ever hold; None where it has no end."""
        most = max_capacity(self.cache)
        return None if most >= UNLIMITED else most


def empty(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> Held:
    """A new one; where it grows, it begins small."""
    policy, room = limit_memory(lm, policy, None, 1, max_len), min(capacity_bucket(1), max_len)
    return Held(
        allocate(lm.config, policy, batch=1, max_len=max_len, initial_len=room, mesh=lm.mesh)
    )


def most_of(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> int | None:
    """``Held.most`` of an empty one, which is not made."""
    policy = limit_memory(lm, policy, None, 1, max_len)
    return Held(abstract_cache(lm.config, policy, batch=1, max_len=max_len, mesh=lm.mesh)).most


def length_for(lm: LanguageModel, max_len: int | None) -> int:
    """Tokens that a chat can have: as asked, or what the model was trained for, at most 4,096.

    Raises:
      ValueError: if the model's mesh divides rows, of which a chat has one.
    """
    if lm.mesh is not None and (rows := shard_over(lm.mesh, common_heads(lm.config)).rows) > 1:
        raise ValueError(
            f"a chat is one text, and this mesh shares out {rows} rows: give one whose data is 1"
        )
    if max_len is not None:
        return max_len
    return min(_LENGTH, trained_context(lm.config) or _LENGTH)


_SETTINGS = DecodingKeywords.__annotations__.keys() | {"max_new_tokens", "stop"}
_AGAIN = 2**32
"""Between the seeds of a turn's answers."""


@dataclass
class Conversation:
    """``length``: tokens that its cache is made for, and ``most``, that there is room for, None
    where there is no end; ``lost``: tokens that a cache held which an error took; ``lock``: held
    while a thread changes it."""

    lm: LanguageModel
    rendering: Rendering
    policy: PolicyChoice
    length: int
    most: int | None
    turns: list[Turn] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    counts: Counter[str] = field(default_factory=Counter)
    held: Held | None = None
    lost: Sequence[int] = ()
    answer: Answer | None = None
    asked: Plan | None = None
    lock: Any = field(default_factory=threading.RLock)

    @property
    def tokens(self) -> int:
        """How many the turns come to."""
        if self.answer is not None and self.asked is not None:
            return len(self.asked.ids) + len(self.answer.tokens)
        marks = self.known.before(len(self.turns)).marks
        return marks[-1][2] if marks and self.turns else 0

    def ask(
        self,
        number: int,
        user: str,
        attempt: int,
        *,
        system: str | None,
        drop: bool,
        seed: int,
        settings: dict[str, Any],
    ) -> Answer:
        """Go back to before turn ``number``, and on with what is asked."""
        self.close()
        turns, known = self.turns[:number], self.known.before(number)
        new = as_int("max_new_tokens", settings["max_new_tokens"], 1)
        plan = planned(
            self.rendering, known, system, turns, user, most=self.most, new=new, drop=drop
        )
        if self.most is not None:
            new = min(new, new_tokens_for(self.most, len(plan.ids)))
        held = self.held or empty(self.lm, self.policy, self.length)
        kept, again = held.back_to(plan.ids)
        request = self.request(
            plan.ids[len(kept.tokens) :],
            kept.cache,
            (seed + number + attempt * _AGAIN) % 2**64,
            settings | {"max_new_tokens": new},
        )
        room = (
            request.capacity if request.capacity < UNLIMITED else capacity_bucket(request.positions)
        )
        request = replace(request, cache_tokens=[list(kept.tokens)], capacity=room)
        stream = Stream(self.lm, request, streamed=True)
        again += common(self.lost, plan.ids)
        self.turns = [*turns, Turn(user, attempt=attempt, first=plan.first)]
        self.known, self.asked, self.held, self.lost = known, plan, None, ()
        ended = functools.partial(self._ended, plan, len(kept.tokens), again)
        self.answer = Answer(stream, ended, self.lock)
        return self.answer

    def request(
        self, ids: list[int], cache: CacheChoice, seed: int, settings: dict[str, Any]
    ) -> GenerationRequest:
        """A request for one answer, checked."""
        for name in settings.keys() - _SETTINGS:
            raise ValueError(f"{name!r} is no setting of a chat's answers")
        new = as_python(settings["max_new_tokens"])
        # Where there is no room for as many as an answer must have, it has what there is.
        least = as_python(settings.get("min_new_tokens", 0))
        least = min(least, new) if isinstance(least, int) else least
        options = GenerationOptions(
            **settings | {"cache": cache, "seed": seed, "min_new_tokens": least}
        )
        return prepare_request(self.lm, [ids], options)

    def close(self) -> None:
        """End the answer that runs."""
        if (answer := self.answer) is not None:
            answer.close()

    def _ended(
        self, plan: Plan, kept: int, again: int, answer: Answer, result: GenerationResult | None
    ) -> GenerationResult | None:
        """Take the end of an answer in, and the cache out of its result; None after an error."""
        self.answer = self.asked = None
        text, tokens, reason, fed = answer.text, answer.tokens, "stopped", len(plan.ids)
        if result is None:
            self.lost = [*plan.ids, *tokens]
        else:
            text, tokens, stats = result.text[0], result.tokens[0], result.stats
            reason = stats.stop_reasons[0]
            held, whole = int(fetch(result.cache.length)[0]), (*plan.ids, *tokens)
            if held <= len(whole):
                self.held = Held(result.cache, whole[:held])
            else:  # behind a stop string that was longer than what a ring can forget
                self.lost = whole
            fed = min(fed, held)
            stats = replace(stats, prompt_tokens=len(plan.ids), cached_tokens=kept)
            nothing: Any = None
            result = replace(result, cache=nothing, stats=stats)
            for name in ("prefill_seconds", "decode_seconds", "compile_seconds"):
                self.counts[name] += getattr(stats, name)
        self.counts += Counter(
            prefilled=fed - kept, known=kept, reread=min(again, fed), generated=len(tokens)
        )
        self.turns[-1] = replace(self.turns[-1], answer=text, tokens=tuple(tokens), reason=reason)
        # The token that ends a text is the template's to write.
        said = tokens[:-1] if reason == "eos" else tokens
        length = self.rendering.length(plan.ids, said, text)
        if length is not None:
            turn = len(self.turns) - 1
            self.known = self.known.answered(turn, plan.text, plan.ids, text[:length], said)
        return result
