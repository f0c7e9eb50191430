"""What a cache reads from a model's config."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from kvjax.core.validation import UNLIMITED, as_bool, as_int, as_optional_int


class CacheShape(Protocol):
    """What ``init_cache`` can't do without."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def decoder_config(config: Any) -> Any:
    """The part of a config that tells of the decoder of text, where it is one of several.

    Raises:
      ValueError: if it does not say how many layers there are.
    """
    find = getattr(config, "get_text_config", None)
    found = config if find is None else find(decoder=True)
    if hasattr(found, "num_hidden_layers"):
        as_int("num_hidden_layers", found.num_hidden_layers, 1)
        return found
    name = type(config).__name__
    if hasattr(config, "config"):
        raise ValueError(f"a model's config is needed, not a {name}: give its .config")
    raise ValueError(f"the config, a {name}, has no num_hidden_layers")


def layer_heads(config: Any) -> tuple[tuple[int, int], ...]:
    """Of each layer, how many heads its keys and values have, and of how many channels.

    By ``num_key_value_heads`` and ``head_dim``, or what Transformers' models go by where a config
    has none: ``multi_query``, ``num_attention_heads``, ``hidden_size``. Layers differ where
    Transformers' ``per_layer_config`` does (Gemma 4).

    Raises:
      ValueError: if the config does not say, or a layer's keys have other channels than its values
        (latent attention).
    """
    config = decoder_config(config)
    return tuple((_kv_heads(each), _head_dim(each)) for each in _configs(config))


def common_heads(config: Any) -> int:
    """The greatest number of key-value heads that divides those of each layer."""
    return math.gcd(*(heads for heads, _ in layer_heads(config)))


def model_dtype(config: Any) -> Any:
    """The config's dtype, None if it has none; PyTorch's by its name."""
    dtype = getattr(config, "dtype", None)
    named = isinstance(dtype, str) or type(dtype).__module__ == "torch"
    return str(dtype).removeprefix("torch.") if named else dtype


def scanned(config: Any) -> bool:
    """Whether a model goes through its layers by a scan, and so takes stacked caches: its config's
    ``stacked``."""
    return as_bool("the config's stacked", getattr(config, "stacked", False))


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """How many tokens back each layer can see at most, None for all.

    By ``windows``, one a layer, or else by ``layer_types``, ``sliding_window`` and
    ``attention_chunk_size`` (Llama 4: a query sees no more than its chunk; the mask itself is
    ``attend(chunk=)``). Without ``layer_types``, a window or a chunk is every layer's but those
    that ``sliding_window_pattern`` or ``max_window_layers`` except.

    Raises:
      ValueError: if there is not one window a layer, or a kind of layer is not known or has no
        size.
    """
    config = decoder_config(config)
    windows = getattr(config, "windows", None)
    if windows is None:
        windows = _windows_by_type(config)
    _check_count(config, windows)
    return tuple(w if w is None else as_int("a layer's window", w, 1) for w in windows)


def layer_sources(config: Any) -> tuple[int, ...] | None:
    """For each layer, the one whose keys and values it reads; None where each has its own.

    By ``cache_sources``, or else by ``num_kv_shared_layers`` (Gemma 3n): so many layers at the end
    read those of the last layer before them that is of the same kind.

    Raises:
      ValueError: if there is not one source a layer, a source is not an earlier layer with keys of
        its own, or there is no layer to share with.
    """
    config = decoder_config(config)
    count = config.num_hidden_layers
    sources = getattr(config, "cache_sources", None)
    shared = getattr(config, "num_kv_shared_layers", None)
    if sources is None and not shared:
        return None
    sources = tuple(_sources_by_type(config, shared) if sources is None else sources)
    reads = [0 <= source <= n and sources[source] == source for n, source in enumerate(sources)]
    if len(sources) != count or not all(reads):
        raise ValueError(
            f"cache_sources {sources}: each of {count} layers needs itself or an earlier layer "
            "that has keys and values of its own"
        )
    return sources


def _configs(config: Any) -> Sequence[Any]:
    """One a layer."""
    own = getattr(config, "per_layer_config", None)
    return own if isinstance(own, Sequence) else (config,) * config.num_hidden_layers


def _told(config: Any, name: str) -> int | None:
    """What a config says of this, if anything."""
    return as_optional_int(name, getattr(config, name, None), 1)


def _query_heads(config: Any, asked: str) -> int:
    heads = _told(config, "num_attention_heads")
    if heads is None:
        raise ValueError(f"the config has neither {asked} nor num_attention_heads")
    return heads


def _kv_heads(config: Any) -> int:
    told = _told(config, "num_key_value_heads")
    if told is not None:
        return told
    # Falcon's and GPT-BigCode's names.
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1
    return _told(config, "num_kv_heads") or _query_heads(config, "num_key_value_heads")


def _head_dim(config: Any) -> int:
    head_dim = _told(config, "head_dim")
    if head_dim is None:
        hidden = _told(config, "hidden_size")
        if hidden is None:
            raise ValueError("the config has neither head_dim nor hidden_size")
        head_dim = max(hidden // _query_heads(config, "head_dim"), 1)
    if getattr(config, "kv_lora_rank", None) or _told(config, "v_head_dim") not in (None, head_dim):
        raise ValueError(
            "the config is of attention whose keys have other channels than its values "
            "(kv_lora_rank, v_head_dim): a layer stores both with as many, so give a config whose "
            "head_dim is the larger, and pad the other"
        )
    return head_dim


def _check_count(config: Any, told: Any) -> None:
    if not isinstance(told, list | tuple):
        raise ValueError(f"the config tells of layers by {told!r:.40}: it must be a list")
    if len(told) != config.num_hidden_layers:
        raise ValueError(
            f"the config tells of {len(told)} layers, and has {config.num_hidden_layers}"
        )


def _windows_by_type(config: Any) -> tuple[int | None, ...]:
    slides = getattr(config, "use_sliding_window", True) is not False
    found = [
        (getattr(each, "sliding_window", None) if slides else None,
         getattr(each, "attention_chunk_size", None))
        for each in _configs(config)
    ]  # fmt: skip
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Every so many-th layer sees all, as in Gemma 3; or the first ones do, as in Qwen 2.
        every = getattr(config, "sliding_window_pattern", None) or config.num_hidden_layers + 1
        first = getattr(config, "max_window_layers", None) or 0
        return tuple(
            None if (layer + 1) % every == 0 or layer < first else window or chunk
            for layer, (window, chunk) in enumerate(found)
        )
    _check_count(config, kinds)
    sized = []
    for kind, (window, chunk) in zip(kinds, found, strict=True):
        sizes = {"sliding_attention": window, "chunked_attention": chunk}
        if kind not in sizes and kind not in ("full_attention", "attention"):
            raise ValueError(
                f"layer_types has {kind!r}: a cache holds layers of full_attention, "
                "sliding_attention and chunked_attention"
            )
        if kind in sizes and sizes[kind] is None:
            raise ValueError(f"layer_types has {kind!r}, but the config does not say how long")
        sized.append(sizes.get(kind))
    return tuple(sized)


def _sources_by_type(config: Any, shared: Any) -> tuple[int, ...]:
    count = config.num_hidden_layers
    kinds = tuple(getattr(config, "layer_types", None) or ("",) * count)
    first = max(count - shared, 0)
    latest = {kind: number for number, kind in enumerate(kinds[:first])}
    for number, kind in enumerate(kinds[first:count], first):
        if kind not in latest:
            raise ValueError(
                f"num_kv_shared_layers is {shared}: layer {number} has no layer of its kind before "
                f"layer {first} to share with"
            )
    return (*range(first), *(latest[kind] for kind in kinds[first:count]))


def beyond_context(config: Any, tokens: int) -> int:
    """By how many tokens a distance between two of them is beyond what the model was trained for:
    the config's ``context``, or ``max_position_embeddings``; 0 where it does not say."""
    context = trained_context(config)
    return max(tokens - context, 0) if context else 0


def trained_context(config: Any) -> int | None:
    """The length that a model was trained for, or None where its config does not say."""
    config = decoder_config(config)
    context = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    return context or position_limit(config)


def position_limit(config: Any) -> int | None:
    """How many positions a model has: its config's ``position_limit``; None, where it does not say,
    for rotary ones, which do not end."""
    return as_optional_int("position_limit", getattr(config, "position_limit", None), 1)


def positions_needed(prompt: int, new: int) -> int:
    """Positions of a model, and places in its cache, for ``prompt`` tokens and ``new`` ones. The
    last new token needs none, because the model never reads it."""
    return prompt + max(new - 1, 0)


def new_tokens_for(positions: int, prompt: int) -> int:
    """The most new tokens after a prompt for which positions suffice: see ``positions_needed``."""
    return positions - prompt + 1 if prompt <= positions else 0


def resolve_rotary_len(
    config: Any, reach: int, chosen: int | None = None
) -> tuple[int | None, int | None]:
    """The length of text that a cache's keys are turned for, None if all lengths are alike; and
    how many tokens a row may have for it, None where the cache itself says how many.

    ``reach``: positions that its distances stay below. By the config's ``same_rotary(length,
    other)``, where it has that. ``chosen``: the length to go by in place of ``reach``.

    Raises:
      ValueError: if ``chosen`` is no length, or frequencies depend on it, none was chosen, and the
        cache has no end.
    """
    chosen = as_optional_int("rotary_len", chosen, 1)
    if same_rotary(config, 1, UNLIMITED):
        return None, None
    if chosen is not None and not same_rotary(config, chosen, reach):
        if chosen < reach:
            return chosen, chosen
        reach = chosen
    if reach >= UNLIMITED:
        raise ValueError(
            "the model's rotary frequencies depend on the length of the text: a cache that grows "
            "needs max_len, the tokens that a row can ever hold, or rotary_len"
        )
    return (1 if same_rotary(config, 1, reach) else reach), None


def same_rotary(config: Any, length: int, other: int) -> bool:
    """Whether texts of up to these two lengths have the same rotary frequencies."""
    told = getattr(config, "same_rotary", None)
    return told is None or told(length, other)
