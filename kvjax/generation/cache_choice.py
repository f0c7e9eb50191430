"""The cache of a request: a given cache, a new cache with a policy, or pages of a prefix tree."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from kvjax.cache.state import KVCache
from kvjax.core.validation import ArgumentError, as_optional_int
from kvjax.generation.encoder import has_encoded, refuse_auto
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import ModelConfig
from kvjax.generation.options import GenerationOptions, Prompts, check_token_ids, tokenize_prompts
from kvjax.layouts import UNLIMITED, as_paged
from kvjax.memory.limits import InferenceLimits, available_memory
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.memory.sizes import abstract_cache, has_encoder
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import positions_needed, same_rotary
from kvjax.policies.presets import Auto, PolicyChoice, per_layer, policy
from kvjax.prefixes.pool import CacheGroup
from kvjax.prefixes.tree import Tenant


def parse_cache(options: GenerationOptions) -> tuple[KVCache | None, PolicyChoice | None]:
    """Return the cache to continue, and the policy of a new cache. One of them is None, or both if
    no cache is used."""
    choice = options.cache
    if isinstance(choice, KVCache):
        if not options.use_cache:
            raise ValueError(
                "a cache was given together with use_cache=False: leave out one of them"
            )
        return choice, None
    if choice is None or isinstance(choice, bool):
        raise ValueError(
            f"cache is {choice!r}: give a policy, its name or a KVCache, or use_cache=False"
        )
    choice = policy(choice) if isinstance(choice, str) else choice
    return None, choice if options.use_cache else None


def limit_memory(
    lm: LanguageModel, choice: PolicyChoice, limits: InferenceLimits | None, batch: int, tokens: int
) -> PolicyChoice:
    """Resolve the memory budget of the policy ``Auto``. It is the smaller of the policy's budget
    and the request's limits. If there is neither, it is the device's available memory. Other
    policies are returned unchanged.

    Raises:
      ValueError: if ``tokens`` tokens do not fit in the budget even with all layers on the host.
    """
    if not isinstance(choice, Auto):
        return choice
    own = choice.memory
    allowed = None if limits is None else limits.allowed(lm, batch=batch, capacity=tokens)
    if allowed is None and own is None:
        try:
            allowed = available_memory(lm, batch=batch, capacity=tokens)
        except ValueError as error:
            raise ValueError(f"policy('auto') without memory=: {error}") from None
    budget = min(bytes for bytes in (own, allowed) if bytes is not None)
    if budget < 1:
        raise ValueError("weights and temporaries leave no device memory for the cache")
    choice = replace(choice, memory=budget)
    # This raises if the budget is too small.
    abstract_cache(lm.config, choice, batch=batch, max_len=tokens, mesh=lm.mesh)
    return choice


def encoder_inputs(
    lm: LanguageModel, prompts: Prompts, options: GenerationOptions
) -> list[list[int]] | None:
    """Return the prompts as token ids, if the model has an encoder, which must read them. The
    decoder then begins with its start token. Returns None if the model has no encoder.

    Raises:
      ValueError: if the model has an encoder and a cache or prefix cache was given.
    """
    if not has_encoder(lm):
        return None
    if options.prefix_cache is not None:
        raise ValueError(
            "prefix_cache does not support models with an encoder: it identifies a sequence by the "
            "decoder's tokens only"
        )
    if has_encoded(lm):
        return None
    refuse_auto(options.cache)
    if isinstance(options.cache, KVCache):
        raise ValueError(
            "a cache was given, but the model's encoder has read no text: call "
            "lm.with_encoder_inputs(texts) first"
        )
    check_token_ids(lm.config, [lm.decoder_start_token_id], "the start token", "lm")
    return tokenize_prompts(lm, prompts, [])


def parse_rotary_len(config: ModelConfig, options: GenerationOptions, need: int) -> int | None:
    """Return the length for which rotary frequencies are computed; None if it is the capacity, or
    the frequencies do not depend on the length.

    Raises:
      ValueError: if a cache was given, or a sequence without a cache would exceed ``rotary_len``.
    """
    length = as_optional_int("rotary_len", options.rotary_len, 1)
    if length is None:
        return None
    if isinstance(options.cache, KVCache) or options.prefix_cache is not None:
        raise ValueError(
            f"rotary_len is {length}, but the keys of a given cache or prefix_cache are already "
            "rotated: set rotary_len where the cache is created"
        )
    if same_rotary(config, 1, UNLIMITED):
        return None
    if not options.use_cache and need > length and not same_rotary(config, length, need):
        raise ValueError(
            f"prompt and max_new_tokens need {need} positions, but rotary_len is {length}"
        )
    return length


def parse_prefix_cache(options: GenerationOptions) -> Tenant | None:
    """Return the prefix tree of a request, with its tenant; None without a prefix cache.

    Raises:
      ValueError: if options contradict the tree's settings.
    """
    given = options.prefix_cache
    if given is None:
        return None
    tenant = given if isinstance(given, Tenant) else Tenant(given, None)
    tree = tenant.tree
    if not options.use_cache:
        raise ValueError("a prefix_cache was given together with use_cache=False")
    fixed = {
        "max_len": (None, tree.pool_config.max_len),
        "prefill_chunk": (PREFILL_CHUNK, tree.pool_config.prefill_chunk),
    }
    for name, (default, value) in fixed.items():
        if getattr(options, name) not in (default, value):
            raise ArgumentError(
                f"{name} is {getattr(options, name)}, but the prefix tree was made with {value}: "
                f"leave {name}= out",
                param=name,
            )
    if options.cache != "static" and options.cache != list(tree.pool_config.policies):
        raise ValueError("the prefix tree has its own policy: leave cache= out")
    return tenant


def size_pools(
    config: ModelConfig,
    choice: PolicyChoice,
    prompts: Sequence[int],
    limit: int,
    samples: int,
    *,
    rows: int,
) -> PolicyChoice:
    """Set the size of page pools for ``samples`` continuations of each prompt, which share the full
    pages of the prompt. Returns the policies.

    Args:
      config: the model's config.
      choice: the policies. ``Auto``, and layouts with a window or given ``pages``, are unchanged.
      prompts: the number of tokens of each prompt.
      limit: the maximum number of new tokens per row.
      samples: the number of continuations of each prompt.
      rows: the number of prompts.
    """
    if isinstance(choice, Auto):
        return choice
    policies = []
    for each in per_layer(choice, config):
        layout = as_paged(each.layout)
        if layout is not None and layout.pages is None and layout.inner.window is None:
            needed = positions_needed(max(prompts), limit)
            each = replace(each, layout=layout.resolve(needed, None))
            pages = _pages(each, layout.page_size, tuple(prompts), limit, samples)
            each = replace(each, layout=replace(layout, pages=rows * pages))
        policies.append(each)
    return policies


@functools.lru_cache(maxsize=256)
def _pages(
    policy: CachePolicy, size: int, prompts: tuple[int, ...], limit: int, samples: int
) -> int:
    """Return the number of pages of ``size`` tokens that the continuations of one prompt need. It
    is the maximum over the prompts."""
    page_group = policy.page_group
    assert page_group is not None
    needed = []
    for tokens in prompts:
        shared = len(CacheGroup(page_group).pages_for(tokens)[0])
        total = -(-positions_needed(tokens, limit) // size)
        needed.append(shared + samples * (total - shared))
    return max(needed)
