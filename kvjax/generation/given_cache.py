"""Which cache a request goes by: one that is given, or the policy of one to make; what an encoder
reads before it."""

from dataclasses import replace
from typing import Any

from kvjax.cache.state import KVCache
from kvjax.core.checks import whole_or_none
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.settings import Options
from kvjax.generation.sources import has_read, refuse_auto
from kvjax.generation.words import Prompts, check_ids, token_ids
from kvjax.layouts import UNLIMITED
from kvjax.memory.limits import InferenceLimits, memory_left
from kvjax.memory.sizes import abstract_cache
from kvjax.memory.weights import encodes
from kvjax.policies.positions import same_rotary
from kvjax.policies.presets import Auto, PolicyChoice, policy


def cache_choice(options: Options) -> tuple[KVCache | None, PolicyChoice | None]:
    """The cache to continue, or the policy of the one to make; neither where none is used."""
    choice = options.cache
    if isinstance(choice, KVCache):
        if not options.use_cache:
            raise ValueError("a cache to continue was given together with use_cache=False")
        return choice, None
    if choice is None or isinstance(choice, bool):
        raise ValueError(
            f"cache is {choice!r}: give a policy, its name or a KVCache; use_cache=False for none"
        )
    choice = policy(choice) if isinstance(choice, str) else choice
    return None, choice if options.use_cache else None


def with_memory(
    lm: LanguageModel, choice: PolicyChoice, limits: InferenceLimits | None, batch: int, tokens: int
) -> PolicyChoice:
    """A policy that keeps to a memory: to its own, or to what limits allow or the device has left.

    Raises:
      ValueError: if there is no room for so many tokens though all layers are on the host.
    """
    if not isinstance(choice, Auto):
        return choice
    memory = choice.memory
    allowed = None if limits is None else limits.allowed(lm, batch=batch, capacity=tokens)
    if allowed is None and memory is None:
        try:
            allowed = memory_left(lm, batch=batch, capacity=tokens)
        except ValueError as error:
            raise ValueError(f"policy('auto') without memory=: {error}") from None
    found = min(bytes for bytes in (memory, allowed) if bytes is not None)
    if found < 1:
        raise ValueError("weights and temporaries leave nothing of the device to the cache")
    choice = replace(choice, memory=found)
    # Where it can't be kept to, this raises.
    abstract_cache(lm.config, choice, batch=batch, max_len=tokens, mesh=lm.mesh)
    return choice


def texts_to_read(lm: LanguageModel, prompts: Prompts, options: Options) -> list[list[int]] | None:
    """Of a model with an encoder that has read nothing yet, the prompts: it reads these, and what
    is written begins with a token of its own. None where prompts are what is continued.

    Raises:
      ValueError: if what is continued, or known, would go by another text.
    """
    if not encodes(lm):
        return None
    if options.prefix_cache is not None:
        raise ValueError(
            "prefix_cache tells texts by their tokens, and what this model's decoder writes goes "
            "by what its encoder has read besides"
        )
    if has_read(lm):
        return None
    refuse_auto(options.cache)
    if isinstance(options.cache, KVCache):
        raise ValueError(
            "a cache to continue was given to a model whose encoder has read no text: "
            "lm.reading(texts) continues with it"
        )
    check_ids(lm.config, [lm.start_token], "the start token")
    return token_ids(lm, prompts, [])


def rotary_asked(config: Any, options: Options, need: int) -> int | None:
    """The length of text that a request's rotary frequencies go by; None where its capacity says.

    Raises:
      ValueError: if a cache is there already, or a text without one would be longer than that.
    """
    chosen = whole_or_none("rotary_len", options.rotary_len, 1)
    if chosen is None:
        return None
    if isinstance(options.cache, KVCache) or options.prefix_cache is not None:
        raise ValueError(
            f"rotary_len is {chosen}, but keys of a cache or a prefix_cache that is given are "
            "turned already: say it where that is made"
        )
    if same_rotary(config, 1, UNLIMITED):
        return None
    if not options.use_cache and need > chosen and not same_rotary(config, chosen, need):
        raise ValueError(
            f"prompt and max_new_tokens need {need} positions, but rotary_len is {chosen}"
        )
    return chosen
