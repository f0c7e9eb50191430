"""What a cache reads from a model's config: layers, heads, windows, shared layers and positions.

A config is any object with the attributes of `CacheShape`. The names that Transformers uses work as
well, so a model can use the config that it was loaded with. If an attribute is missing or None, its
default is the same as in Transformers.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

from kvjax.core.validation import UNLIMITED, as_bool, as_int, as_optional_int


class CacheShape(Protocol):
    """The attributes that ``init_cache`` requires."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def decoder_config(config: object) -> CacheShape:
    """Return the config of the text decoder. This is ``config`` itself, unless it has separate
    configs for several parts of a model.

    Raises:
      ValueError: if it has no ``num_hidden_layers``.
    """
    find = getattr(config, "get_text_config", None)
    decoder = config if find is None else find(decoder=True)
    if hasattr(decoder, "num_hidden_layers"):
        shape = cast(CacheShape, decoder)
        as_int("num_hidden_layers", shape.num_hidden_layers, 1)
        return shape
    name = type(config).__name__
    if hasattr(config, "config"):
        raise ValueError(f"a model's config is needed, not a {name}: give its .config")
    raise ValueError(f"the config, a {name}, has no num_hidden_layers")


def layer_heads(config: object) -> tuple[tuple[int, int], ...]:
    """Return the number of key-value heads and the head dimension of each layer.

    They are read from ``num_key_value_heads`` and ``head_dim``, or from the attributes that
    Transformers uses instead: ``multi_query``, ``num_attention_heads``, ``hidden_size``. Layers can
    differ if the config has Transformers' ``per_layer_config`` (Gemma 4).

    Raises:
      ValueError: if an attribute is missing, or keys and values of a layer have different head
        dimensions (latent attention).
    """
    config = decoder_config(config)
    return tuple((_kv_heads(layer), _head_dim(layer)) for layer in _layer_configs(config))


def common_heads(config: object) -> int:
    """Return the greatest common divisor of the layers' numbers of key-value heads."""
    return math.gcd(*(heads for heads, _ in layer_heads(config)))


def model_dtype(config: object) -> Any:
    """Return the config's dtype; None if it has none. PyTorch's dtypes are returned as strings."""
    dtype = getattr(config, "dtype", None)
    named = isinstance(dtype, str) or type(dtype).__module__ == "torch"
    return str(dtype).removeprefix("torch.") if named else dtype


def scanned(config: object) -> bool:
    """Return whether the model runs its layers in a ``lax.scan`` and so needs a stacked cache. The
    config's ``stacked`` says so."""
    return as_bool("the config's stacked", getattr(config, "stacked", False))


def layer_windows(config: object) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens, None for full attention.

    They are read from ``windows``, one per layer, or else from ``layer_types``, ``sliding_window``
    and ``attention_chunk_size``. With a chunk size (Llama 4), a query sees at most its chunk, and
    ``attend(chunk=)`` applies the mask. Without ``layer_types``, all layers have the window or the
    chunk, except the layers that ``sliding_window_pattern`` or ``max_window_layers`` exclude.

    Raises:
      ValueError: if the number of windows is not the number of layers, or a layer type is unknown
        or has no size.
    """
    config = decoder_config(config)
    windows = getattr(config, "windows", None)
    if windows is None:
        windows = _windows_by_type(config)
    _check_count(config, windows)
    return tuple(w if w is None else as_int("a layer's window", w, 1) for w in windows)


def layer_sources(config: object) -> tuple[int, ...] | None:
    """For each layer, return the index of the layer whose keys and values it reads. Returns None if
    each layer has its own.

    They are read from ``cache_sources``, or else from ``num_kv_shared_layers`` (Gemma 3n), the
    number of layers at the end that have no keys and values. Each of these reads the last earlier
    layer that has keys and values and the same type.

    Raises:
      ValueError: if the number of sources is not the number of layers, a source is not an earlier
        layer with its own keys, or no earlier layer has the same type.
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


def _layer_configs(config: CacheShape) -> Sequence[object]:
    """Return one config per layer."""
    own = getattr(config, "per_layer_config", None)
    return own if isinstance(own, Sequence) else (config,) * config.num_hidden_layers


def _positive_int(config: object, name: str) -> int | None:
    """Return an integer attribute of a config; None if it is missing or None."""
    return as_optional_int(name, getattr(config, name, None), 1)


def _query_heads(config: object, missing: str) -> int:
    """Return the number of query heads, as the default for the attribute ``missing``."""
    heads = _positive_int(config, "num_attention_heads")
    if heads is None:
        raise ValueError(f"the config has neither {missing} nor num_attention_heads")
    return heads


def _kv_heads(config: object) -> int:
    heads = _positive_int(config, "num_key_value_heads")
    if heads is not None:
        return heads
    # The names that Falcon and GPT-BigCode use.
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1
    return _positive_int(config, "num_kv_heads") or _query_heads(config, "num_key_value_heads")


def _head_dim(config: object) -> int:
    head_dim = _positive_int(config, "head_dim")
    if head_dim is None:
        hidden = _positive_int(config, "hidden_size")
        if hidden is None:
            raise ValueError("the config has neither head_dim nor hidden_size")
        head_dim = max(hidden // _query_heads(config, "head_dim"), 1)
    value_dim = _positive_int(config, "v_head_dim")
    if getattr(config, "kv_lora_rank", None) or value_dim not in (None, head_dim):
        raise ValueError(
            "keys and values have different head dimensions (kv_lora_rank, v_head_dim), but a "
            "cache layer stores both with the same one: give a config with the larger as "
            "head_dim, and pad the other"
        )
    return head_dim


def _check_count(config: CacheShape, values: object) -> None:
    """Raise ``ValueError`` unless ``values`` is a list with one value per layer."""
    if not isinstance(values, list | tuple):
        raise ValueError(f"the config must describe its layers by a list, not by {values!r:.40}")
    if len(values) != config.num_hidden_layers:
        raise ValueError(
            f"the config describes {len(values)} layers, but has {config.num_hidden_layers}"
        )


def _windows_by_type(config: CacheShape) -> tuple[int | None, ...]:
    slides = getattr(config, "use_sliding_window", True) is not False
    sizes_by_layer = [
        (getattr(each, "sliding_window", None) if slides else None,
         getattr(each, "attention_chunk_size", None))
        for each in _layer_configs(config)
    ]  # fmt: skip
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Every n-th layer has full attention, as in Gemma 3; or the first layers do, as in Qwen 2.
        every = getattr(config, "sliding_window_pattern", None) or config.num_hidden_layers + 1
        first = getattr(config, "max_window_layers", None) or 0
        return tuple(
            None if (layer + 1) % every == 0 or layer < first else window or chunk
            for layer, (window, chunk) in enumerate(sizes_by_layer)
        )
    _check_count(config, kinds)
    sized = []
    for kind, (window, chunk) in zip(kinds, sizes_by_layer, strict=True):
        sizes = {"sliding_attention": window, "chunked_attention": chunk}
        if kind not in sizes and kind not in ("full_attention", "attention"):
            raise ValueError(
                f"layer_types has {kind!r}: a cache holds layers of full_attention, "
                "sliding_attention and chunked_attention"
            )
        if kind in sizes and sizes[kind] is None:
            raise ValueError(
                f"layer_types has {kind!r}, but the config does not set the size of its window or "
                "chunk"
            )
        sized.append(sizes.get(kind))
    return tuple(sized)


def _sources_by_type(config: CacheShape, shared: Any) -> tuple[int, ...]:
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


def beyond_context(config: object, tokens: int) -> int:
    """Return the number of tokens by which ``tokens`` exceeds the model's training context; 0 if
    the config does not give the context."""
    context = trained_context(config)
    return max(tokens - context, 0) if context else 0


def trained_context(config: object) -> int | None:
    """Return the context length that a model was trained with, in tokens. It is the config's
    ``context``, ``max_position_embeddings`` or ``position_limit``; None if the config has none of
    these."""
    config = decoder_config(config)
    context = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    return context or position_limit(config)


def position_limit(config: object) -> int | None:
    """Return the number of positions that a model supports, from the config's ``position_limit``.
    None means no limit, as with rotary positions."""
    return as_optional_int("position_limit", getattr(config, "position_limit", None), 1)


def positions_needed(prompt: int, new: int) -> int:
    """Return the number of positions (cache slots) that ``prompt`` tokens and ``new`` generated
    tokens need. The last new token needs none, because the model never reads it."""
    return prompt + max(new - 1, 0)


def new_tokens_for(positions: int, prompt: int) -> int:
    """Return the maximum number of tokens that can be generated after ``prompt`` tokens if there
    are ``positions`` positions. This is the inverse of ``positions_needed``."""
    return positions - prompt + 1 if prompt <= positions else 0


def resolve_rotary_len(
    config: object, reach: int, chosen: int | None = None
) -> tuple[int | None, int | None]:
    """Return the sequence length whose rotary frequencies a cache uses, and the limit that it
    implies.

    Args:
      config: a model's config. Frequencies depend on the length if the config has a method
        ``same_rotary(length, other)`` that returns False for some lengths.
      reach: an upper bound: all distances between tokens in the cache are smaller.
      chosen: the length to use instead of ``reach``.

    Returns:
      The length (None if all lengths have the same frequencies), and the maximum number of tokens
      of a row (None if the length implies no limit).

    Raises:
      ValueError: if ``chosen`` is not a positive integer; or if frequencies depend on the length,
        none was chosen, and the cache has no limit.
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
            "the model's rotary frequencies depend on the sequence length: a cache without a limit "
            "needs max_len, the most tokens that a row can ever hold, or rotary_len"
        )
    return (1 if same_rotary(config, 1, reach) else reach), None


def same_rotary(config: object, length: int, other: int) -> bool:
    """Return whether sequences of these two lengths have the same rotary frequencies."""
    same = getattr(config, "same_rotary", None)
    return same is None or same(length, other)
