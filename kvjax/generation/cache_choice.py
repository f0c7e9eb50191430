"""Choose the cache of a request: a given one, a new one by policy, or a prefix tree's."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvjax.cache.state import KVCache
from kvjax.core.validation import as_optional_int
from kvjax.generation.encoder import has_encoded, refuse_auto
from kvjax.generation.inputs import Prompts, check_token_ids, tokenize_prompts
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import ModelConfig
from kvjax.generation.options import GenerationOptions
from kvjax.layouts import UNLIMITED, paged
from kvjax.memory.limits import InferenceLimits, available_memory
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.memory.sizes import abstract_cache, has_encoder
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import positions_needed, same_rotary
from kvjax.policies.presets import Auto, PolicyChoice, per_layer, policy
from kvjax.prefixes.pool import CacheGroup
from kvjax.prefixes.tree import Tenant


def parse_cache(options: GenerationOptions) -> tuple[KVCache | None, PolicyChoice | None]:
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


def limit_memory(
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
            allowed = available_memory(lm, batch=batch, capacity=tokens)
        except ValueError as error:
            raise ValueError(f"policy('auto') without memory=: {error}") from None
    found = min(bytes for bytes in (memory, allowed) if bytes is not None)
    if found < 1:
        raise ValueError("weights and temporaries leave nothing of the device to the cache")
    choice = replace(choice, memory=found)
    # Where it can't be kept to, this raises.
    abstract_cache(lm.config, choice, batch=batch, max_len=tokens, mesh=lm.mesh)
    return choice


def encoder_inputs(
    lm: LanguageModel, prompts: Prompts, options: GenerationOptions
) -> list[list[int]] | None:
    """Of a model with an encoder that has read nothing yet, the prompts: it reads these, and what
    is written begins with a token of its own. None where prompts are what is continued.

    Raises:
      ValueError: if what is continued, or known, would go by another text.
    """
    if not has_encoder(lm):
        return None
    if options.prefix_cache is not None:
        raise ValueError(
            "prefix_cache tells texts by their tokens, and what this model's decoder writes goes "
            "by what its encoder has read besides"
        )
    if has_encoded(lm):
        return None
    refuse_auto(options.cache)
    if isinstance(options.cache, KVCache):
        raise ValueError(
            "a cache to continue was given to a model whose encoder has read no text: "
            "lm.reading(texts) continues with it"
        )
    check_token_ids(lm.config, [lm.start_token], "the start token")
    return tokenize_prompts(lm, prompts, [])


def parse_rotary_len(config: Any, options: GenerationOptions, need: int) -> int | None:
    """The length of text that a request's rotary frequencies go by; None where its capacity says.

    Raises:
      ValueError: if a cache is there already, or a text without one would be longer than that.
    """
    chosen = as_optional_int("rotary_len", options.rotary_len, 1)
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


def parse_prefix_cache(options: GenerationOptions) -> Tenant | None:
    """Where the beginnings of prompts may be known.

    Raises:
      ValueError: if what a tree has fixed was given besides.
    """
    found = options.prefix_cache
    if found is None:
        return None
    found = found if isinstance(found, Tenant) else Tenant(found, None)
    tree = found.tree
    if not options.use_cache:
        raise ValueError("a prefix_cache was given together with use_cache=False")
    fixed = {
        "max_len": (None, tree.pool_config.max_len),
        "prefill_chunk": (PREFILL_CHUNK, tree.pool_config.prefill_chunk),
    }
    for name, known in fixed.items():
        if getattr(options, name) not in known:
            raise ValueError(
                f"{name} is {getattr(options, name)}, but the prefix tree's is {known[1]}: the "
                "texts that it has were computed so"
            )
    if options.cache != "static" and options.cache != list(tree.pool_config.policies):
        raise ValueError("the prefix tree has a policy of its own: leave cache= out")
    return found


def size_pools(
    config: ModelConfig,
    choice: PolicyChoice,
    texts: Sequence[int],
    limit: int,
    samples: int,
    *,
    rows: int,
) -> PolicyChoice:
    """A policy whose pools have as many pages as ``samples`` continuations of each of so many rows
    can need, who share the full ones of their prompt, of one of the lengths ``texts``."""
    if isinstance(choice, Auto):
        return choice
    found = []
    for each in per_layer(choice, config):
        layout = paged(each.layout)
        if layout is not None and layout.pages is None and layout.inner.window is None:
            each = replace(each, layout=layout.resolve(positions_needed(max(texts), limit), None))
            layout = replace(
                layout, pages=rows * _pages(each, layout.page_size, tuple(texts), limit, samples)
            )
            each = replace(each, layout=layout)
        found.append(each)
    return found


@functools.lru_cache(maxsize=256)
def _pages(policy: CachePolicy, size: int, texts: tuple[int, ...], limit: int, samples: int) -> int:
    """The most pages, of ``size`` tokens, that ``samples`` continuations of a prompt need, which
    is of one of these lengths."""
    page_group = policy.page_group
    assert page_group is not None
    needs = []
    for tokens in texts:
        full = len(CacheGroup(page_group).pages_for(tokens)[0])
        most = -(-positions_needed(tokens, limit) // size)
        needs.append(full + samples * (most - full))
    return max(needs)
