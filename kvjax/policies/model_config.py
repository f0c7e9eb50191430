"""What a cache asks of a model's config: its shape, and what is special about single layers.

A config is any object with the attributes of ``CacheShape``. ``windows`` and ``cache_sources`` are
read where it has them; the names that Transformers uses serve as well, so that a model of one's
own can go by the config it was loaded with.
"""

from typing import Any, Protocol

from kvjax.core.checks import UNLIMITED, whole_number


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


def model_dtype(config: Any) -> Any:
    """The config's dtype, None if it has none; PyTorch's by its name."""
    dtype = getattr(config, "dtype", None)
    return str(dtype).removeprefix("torch.") if type(dtype).__module__ == "torch" else dtype


def rotary_length(config: Any, reach: int) -> int | None:
    """The length of text that a cache's keys are turned for, or None if all lengths are alike.

    ``reach``: positions that its distances stay below. By the config's ``same_rotary(length,
    other)``, where it has that.

    Raises:
      ValueError: if frequencies depend on the length, and the cache has no end.
    """
    if same_rotary(config, 1, UNLIMITED):
        return None
    if reach >= UNLIMITED:
        raise ValueError(
            "the model's rotary frequencies depend on the length of the text: a cache that grows "
            "needs max_len, the tokens that a row can ever hold"
        )
    return 1 if same_rotary(config, 1, reach) else reach


def same_rotary(config: Any, length: int, other: int) -> bool:
    """Whether texts of up to these two lengths have the same rotary frequencies."""
    told = getattr(config, "same_rotary", None)
    return told is None or told(length, other)


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
    windows = getattr(config, "windows", None)
    if windows is None:
        windows = _windows_by_type(config)
    if len(windows) != config.num_hidden_layers:
        raise ValueError(
            f"the config tells of {len(windows)} layers, and has {config.num_hidden_layers}"
        )
    return tuple(w if w is None else whole_number("a layer's window", w, 1) for w in windows)


def layer_sources(config: Any) -> tuple[int, ...] | None:
    """For each layer, the one whose keys and values it reads; None where each has its own.

    By ``cache_sources``, or else by ``num_kv_shared_layers`` (Gemma 3n): so many layers at the end
    read those of the last layer before them that is of the same kind.

    Raises:
      ValueError: if there is not one source a layer, a source is not an earlier layer with keys of
        its own, or there is no layer to share with.
    """
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


def _windows_by_type(config: Any) -> tuple[int | None, ...]:
    slides = getattr(config, "use_sliding_window", True) is not False
    window = getattr(config, "sliding_window", None) if slides else None
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        # Every so many-th layer sees all, as in Gemma 3; or the first ones do, as in Qwen 2.
        every = getattr(config, "sliding_window_pattern", None) or config.num_hidden_layers + 1
        first = getattr(config, "max_window_layers", None) or 0
        return tuple(
            None if (layer + 1) % every == 0 or layer < first else window or chunk
            for layer in range(config.num_hidden_layers)
        )
    sizes = {"sliding_attention": window, "chunked_attention": chunk}
    for kind in kinds:
        if kind not in sizes and kind not in ("full_attention", "attention"):
            raise ValueError(f"layer_types has {kind!r}: no such kind of layer is known")
        if kind in sizes and sizes[kind] is None:
            raise ValueError(f"layer_types has {kind!r}, but the config does not say how long")
    return tuple(sizes.get(kind) for kind in kinds)


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
