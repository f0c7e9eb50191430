"""What rows of a request share: beginnings that a tree knows, and the pages of several samples."""

import functools
from collections.abc import Sequence
from dataclasses import replace

from kvjax.generation.model import ModelConfig
from kvjax.generation.settings import Options
from kvjax.layouts import paged
from kvjax.memory.planning import PREFILL
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.positions import positions_needed
from kvjax.policies.presets import Auto, PolicyChoice, per_layer
from kvjax.prefixes.kinds import Kind
from kvjax.prefixes.tree import Tenant


def known_prefixes(options: Options) -> Tenant | None:
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
        "max_len": (None, tree.terms.max_len),
        "prefill_chunk": (PREFILL, tree.terms.prefill_chunk),
    }
    for name, known in fixed.items():
        if getattr(options, name) not in known:
            raise ValueError(
                f"{name} is {getattr(options, name)}, but the prefix tree's is {known[1]}: the "
                "texts that it has were computed so"
            )
    if options.cache != "static" and options.cache != list(tree.terms.policies):
        raise ValueError("the prefix tree has a policy of its own: leave cache= out")
    return found


def for_samples(
    config: ModelConfig, choice: PolicyChoice, texts: Sequence[int], limit: int, samples: int,
    *, rows: int,
) -> PolicyChoice:  # fmt: skip
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
    paging = policy.paging
    assert paging is not None
    needs = []
    for tokens in texts:
        full = len(Kind(paging).needed(tokens)[0])
        most = -(-positions_needed(tokens, limit) // size)
        needs.append(full + samples * (most - full))
    return max(needs)
