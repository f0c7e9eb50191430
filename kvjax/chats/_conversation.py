"""The state of a chat: its turns, their tokens, and the cache of these tokens."""

import functools
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.chats.answer import Answer
from kvjax.chats.rendering import (
    ChatPrompt,
    Rendering,
    TokenizedText,
    Turn,
    common_length,
    fit_prompt,
)
from kvjax.core.transfer import fetch
from kvjax.core.validation import ArgumentError, as_int, as_python
from kvjax.generation.cache_choice import limit_memory
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import capacity_bucket, max_capacity
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

_DEFAULT_LENGTH = 4096
"""The maximum number of tokens of a chat, unless the user sets ``max_len``."""
_SETTINGS = DecodingKeywords.__annotations__.keys() | {"max_new_tokens", "stop"}
_ATTEMPT_SEEDS = 2**32
"""The difference between the seeds of successive answers to one message."""


@dataclass(frozen=True)
class ChatCache:
    """A cache with one row, and the tokens in it."""

    cache: KVCache
    tokens: tuple[int, ...] = ()

    def rewound_to(self, ids: Sequence[int]) -> tuple["ChatCache", int]:
        """Rewind to the longest common prefix of the cached tokens and ``ids[:-1]``. If the cache
        can't be rewound that far, it is emptied.

        Returns:
          The cache, and the number of common tokens that were lost because it was emptied.
        """
        same = min(common_length(self.tokens, ids), len(ids) - 1)
        surplus = len(self.tokens) - same
        if not surplus:
            return self, 0
        if surplus > fetch(rewindable(self.cache))[0]:
            return ChatCache(reset(self.cache)), same
        return ChatCache(rewind(self.cache, surplus), self.tokens[:same]), 0

    @property
    def capacity(self) -> int | None:
        """The maximum number of tokens; None for no limit."""
        capacity = max_capacity(self.cache)
        return None if capacity >= UNLIMITED else capacity


def new_cache(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> ChatCache:
    """Create an empty cache. If its policy can grow, it starts small."""
    policy = limit_memory(lm, policy, None, 1, max_len)
    initial_len = min(capacity_bucket(1), max_len)
    return ChatCache(
        allocate(lm.config, policy, batch=1, max_len=max_len, initial_len=initial_len, mesh=lm.mesh)
    )


def cache_capacity(lm: LanguageModel, policy: PolicyChoice, max_len: int) -> int | None:
    """Return the capacity that a ``new_cache`` would have, without creating it."""
    policy = limit_memory(lm, policy, None, 1, max_len)
    shapes = abstract_cache(lm.config, policy, batch=1, max_len=max_len, mesh=lm.mesh)
    return ChatCache(shapes).capacity


def chat_length(lm: LanguageModel, max_len: int | None) -> int:
    """Return the maximum number of tokens of a chat. It is ``max_len``, or by default the length of
    the model's training sequences, but at most 4,096.

    Raises:
      ValueError: if the model's mesh splits rows, since a chat has only one row.
    """
    if lm.mesh is not None and (rows := shard_over(lm.mesh, common_heads(lm.config)).rows) > 1:
        raise ValueError(
            f"the mesh splits rows over {rows} devices, but a chat has one row; use a mesh whose "
            "data axis has size 1"
        )
    if max_len is not None:
        return max_len
    return min(_DEFAULT_LENGTH, trained_context(lm.config) or _DEFAULT_LENGTH)


@dataclass
class Conversation:
    """The state of a chat.

    Attributes:
      length: the number of tokens for which the cache is created.
      capacity: the maximum number of tokens of the chat; None for no limit.
      tokenized: the text and the tokens of the turns.
      counts: statistics of completed answers.
      cached: the cache; None before the first answer and after an error.
      lost: the tokens of a cache that was lost by an error.
      answer, prompt: an unfinished answer and its prompt.
      lock: a lock that a thread holds while it changes the chat.
    """

    lm: LanguageModel
    rendering: Rendering
    policy: PolicyChoice
    length: int
    capacity: int | None
    turns: list[Turn] = field(default_factory=list)
    tokenized: TokenizedText = field(default_factory=TokenizedText)
    counts: Counter[str] = field(default_factory=Counter)
    cached: ChatCache | None = None
    lost: Sequence[int] = ()
    answer: Answer | None = None
    prompt: ChatPrompt | None = None
    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all turns."""
        if self.answer is not None and self.prompt is not None:
            return len(self.prompt.ids) + len(self.answer.tokens)
        cuts = self.tokenized.with_cuts_before(len(self.turns)).cuts
        return cuts[-1][2] if cuts and self.turns else 0

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
        """Drop turn ``number`` and all turns after it, then answer ``user``."""
        self.close()
        turns, tokenized = self.turns[:number], self.tokenized.with_cuts_before(number)
        new = as_int("max_new_tokens", settings["max_new_tokens"], 1)
        prompt = fit_prompt(
            self.rendering,
            tokenized,
            system,
            turns,
            user,
            capacity=self.capacity,
            new=new,
            drop=drop,
        )
        if self.capacity is not None:
            new = min(new, new_tokens_for(self.capacity, len(prompt.ids)))
        cached = self.cached or new_cache(self.lm, self.policy, self.length)
        cached, recomputed = cached.rewound_to(prompt.ids)
        request = self.request(
            prompt.ids[len(cached.tokens) :],
            cached.cache,
            (seed + number + attempt * _ATTEMPT_SEEDS) % 2**64,
            settings | {"max_new_tokens": new},
        )
        capacity = request.capacity
        if capacity >= UNLIMITED:
            capacity = capacity_bucket(request.positions)
        request = replace(request, cache_tokens=[list(cached.tokens)], capacity=capacity)
        stream = Stream(self.lm, request, streamed=True)
        recomputed += common_length(self.lost, prompt.ids)
        self.turns = [*turns, Turn(user, attempt=attempt, first=prompt.first)]
        self.tokenized, self.prompt, self.cached, self.lost = tokenized, prompt, None, ()
        on_end = functools.partial(self._end, prompt, len(cached.tokens), recomputed)
        self.answer = Answer(stream, on_end, self.lock)
        return self.answer

    def request(
        self, ids: list[int], cache: CacheChoice, seed: int, settings: dict[str, Any]
    ) -> GenerationRequest:
        """Check the settings, and make the generation request for one answer."""
        for name in settings.keys() - _SETTINGS:
            raise ArgumentError(f"{name!r} is not a setting of a chat's answers", param=name)
        new = as_python(settings["max_new_tokens"])
        # If the chat is almost full, an answer may be shorter than min_new_tokens.
        min_new = as_python(settings.get("min_new_tokens", 0))
        min_new = min(min_new, new) if isinstance(min_new, int) else min_new
        options = GenerationOptions(
            **settings | {"cache": cache, "seed": seed, "min_new_tokens": min_new}
        )
        return prepare_request(self.lm, [ids], options)

    def close(self) -> None:
        """Stop an unfinished answer."""
        if (answer := self.answer) is not None:
            answer.close()

    def _end(
        self,
        prompt: ChatPrompt,
        cached_tokens: int,
        recomputed: int,
        answer: Answer,
        result: GenerationResult | None,
    ) -> GenerationResult | None:
        """Record an answer that has ended, and take the cache out of its result. The result is None
        after an error."""
        self.answer = self.prompt = None
        text, tokens, reason, fed = answer.text, answer.tokens, "stopped", len(prompt.ids)
        if result is None:
            self.lost = [*prompt.ids, *tokens]
        else:
            text, tokens, stats = result.text[0], result.tokens[0], result.stats
            reason = stats.finish_reasons[0]
            length, sequence = int(fetch(result.cache.length)[0]), (*prompt.ids, *tokens)
            if length <= len(sequence):
                self.cached = ChatCache(result.cache, sequence[:length])
            else:  # after a stop string that is longer than a ring can rewind
                self.lost = sequence
            fed = min(fed, length)
            stats = replace(stats, prompt_tokens=len(prompt.ids), cached_tokens=cached_tokens)
            nothing: Any = None
            result = replace(result, cache=nothing, stats=stats)
            for name in ("prefill_seconds", "decode_seconds", "compile_seconds"):
                self.counts[name] += getattr(stats, name)
        self.counts += Counter(
            prefill_tokens=fed - cached_tokens,
            cached_tokens=cached_tokens,
            recomputed_tokens=min(recomputed, fed),
            new_tokens=len(tokens),
        )
        self.turns[-1] = replace(
            self.turns[-1], answer=text, tokens=tuple(tokens), finish_reason=reason
        )
        # The template writes the end token of an answer itself.
        answer_tokens = tokens[:-1] if reason == "eos" else tokens
        length = self.rendering.length(prompt.ids, answer_tokens, text)
        if length is not None:
            turn = len(self.turns) - 1
            self.tokenized = self.tokenized.with_answer(
                turn, prompt.text, prompt.ids, text[:length], answer_tokens
            )
        return result
