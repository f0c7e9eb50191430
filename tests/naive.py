"""A decoder in plain numpy float64, token by token, that shares no code with the project.

It is what the cache is measured against: no cache, no blocks, no padding; each token looks at a
list of the tokens before it.
"""

from typing import Any, NamedTuple

import numpy as np


class Coded(NamedTuple):
    """A layer with a tail: what a query sees through codecs is older than its own block of
    ``block`` tokens and the ``recent`` ones before it. ``keys`` and ``values`` are what the codecs
    do to a block [kv_heads, block, head_dim]; ``unrotated``: keys are coded before their rotation;
    ``sinks``: the first tokens, which are never seen through codecs.
    """

    block: int
    recent: int
    keys: Any
    values: Any
    unrotated: bool
    sinks: int = 0


def logits(
    params: Any,
    config: Any,
    tokens: list[int],
    *,
    store: Any = lambda x: x,
    sight: Any = lambda layer: (None, 0),
    coded: Any = lambda layer: None,
) -> np.ndarray:
    """[tokens, vocab]. ``store`` is what the codec does to the keys and values a cache holds;
    ``sight(layer)`` the window (or None) and the sinks that its layout leaves to be seen;
    ``coded(layer)`` its ``Coded``, if it has a tail."""
    weights = _wide(params)
    model = weights["model"]
    x = model["embed_tokens"]["weight"][tokens]
    for number in range(config.num_hidden_layers):
        layer = model["layers"][str(number)]
        h = _rms(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
        window, sinks = sight(number)
        windows = [w for w in (window, config.windows[number]) if w is not None]
        cap = None if window is None else sinks + min(windows) - 1
        projections = (layer["self_attn"][name] for name in ("q_proj", "k_proj", "v_proj"))
        mixed = attended(
            *(_projected(h, weights, config.head_dim) for weights in projections),
            store=store, cap=cap, window=min(windows, default=None), sinks=sinks,
            coded=coded(number), theta=config.rope.theta,
        ).reshape(len(h), -1)  # fmt: skip
        x = x + mixed @ layer["self_attn"]["o_proj"]["weight"].T
        h = _rms(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        gate = h @ layer["mlp"]["gate_proj"]["weight"].T
        up = h @ layer["mlp"]["up_proj"]["weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp"]["down_proj"]["weight"].T
    return _rms(x, model["norm"]["weight"], config.rms_norm_eps) @ model["embed_tokens"]["weight"].T


def attention(
    query: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    *,
    window: int | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    scale: float | None = None,
    sink_query: np.ndarray | None = None,
) -> np.ndarray:
    """One query [head_dim], the newest of the text, over lists of [head_dim]; ``sink_query`` is
    the same one turned as the sinks see it."""
    if not keys:
        return np.zeros_like(query)
    at = len(keys) - 1
    seen = [p for p in range(len(keys)) if window is None or p > at - window or p < sinks]
    other = query if sink_query is None else sink_query
    scores = np.array([keys[p] @ (other if p < sinks else query) for p in seen])
    scores = scores * (len(query) ** -0.5 if scale is None else scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ np.array([values[p] for p in seen])


def rotate(x: np.ndarray, position: int, theta: float = 10000.0) -> np.ndarray:
    """[head_dim] turned to its position; pairs are (i, i + half)."""
    half = len(x) // 2
    exponent = np.arange(0, 2 * half, 2, dtype=np.float32) / np.float32(2 * half)
    angles = position * (1.0 / np.float32(theta) ** exponent).astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def attended(
    queries: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    store: Any = lambda x: x,
    cap: int | None = None,
    window: int | None = None,
    sinks: int = 0,
    coded: Coded | None = None,
    theta: float = 10000.0,
) -> np.ndarray:
    """A text's attention [tokens, heads, head_dim], token by token, from what stands unrotated in
    [tokens, heads, head_dim]; ``cap``: the farthest that sinks are looked at from."""
    rows = []
    heads = range(keys.shape[1])
    held: tuple[dict, dict] = ({h: [] for h in heads}, {h: [] for h in heads})
    body: tuple[dict, dict] = ({h: [] for h in heads}, {h: [] for h in heads})
    group = queries.shape[1] // keys.shape[1]
    for position, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        for head in heads:
            held[0][head].append(store(rotate(k[head], position, theta)))
            held[1][head].append(store(v[head]))
        old = 0  # tokens that this query sees through the codec
        if coded is not None:
            old = max(position // coded.block - coded.recent, 0) * coded.block
            while len(body[0][0]) < old:
                _encode_block(coded, len(body[0][0]), keys, *held, body, theta)
        first = min(max(sinks, 0 if coded is None else coded.sinks), old)
        k_seen, v_seen = (
            {h: every[h][:first] + part[h][first:old] + every[h][old:] for h in heads}
            for every, part in zip(held, body, strict=True)
        )
        rows.append(
            [
                attention(
                    rotate(one, position, theta),
                    k_seen[head // group],
                    v_seen[head // group],
                    window=window,
                    sinks=sinks,
                    sink_query=None if cap is None else rotate(one, min(position, cap), theta),
                )
                for head, one in enumerate(q)
            ]
        )
    return np.array(rows).reshape(queries.shape)


def _projected(x: np.ndarray, weights: Any, size: int) -> np.ndarray:
    """[tokens, heads, head_dim]."""
    return (x @ weights["weight"].T).reshape(len(x), -1, size)


def _encode_block(
    coded: Coded, start: int, plain: Any, keys: Any, values: Any, body: Any, theta: float
) -> None:
    """Append the block of tokens from ``start`` on to the body."""
    block = range(start, start + coded.block)
    k = np.array([[plain[p][h] if coded.unrotated else keys[h][p] for p in block] for h in keys])
    v = np.array([[values[h][p] for p in block] for h in keys])
    k, v = coded.keys(k).astype(np.float64), coded.values(v).astype(np.float64)
    for h in keys:
        turned = zip(k[h], block, strict=True)
        body[0][h] += [rotate(x, p, theta) if coded.unrotated else x for x, p in turned]
        body[1][h] += list(v[h])


def _rms(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def _wide(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _wide(child) for key, child in tree.items()}
    return np.asarray(tree, np.float64)
