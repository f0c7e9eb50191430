"""The law matrix: every policy that the laws are tested on. A new part joins by a line here."""

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest

import kvjax
from kvjax.models.architecture import Architecture
from kvjax.models.config import LlamaConfig, RopeConfig


class Cell(NamedTuple):
    """A policy, what its codec does to a number, and how close its logits come to the truth.

    ``sight``: for a layer, the window and the sinks that the layout leaves to be seen. ``coded``:
    for a layer, its ``naive.Coded``, if it has a tail.
    """

    policy: Any
    store: Any = lambda x: x
    tolerance: float = 1e-5
    sight: Any = lambda layer: (None, 0)
    coded: Any = lambda layer: None


def _rounded(dtype: str) -> Any:
    return lambda x: np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)


CELLS = {
    "dense-raw-device": Cell(kvjax.policy("static")),
    "dense-bfloat16-device": Cell(
        kvjax.policy("static", dtype="bfloat16"), _rounded("bfloat16"), 1e-3
    ),
    "dense-float16-device": Cell(
        kvjax.policy("static", dtype="float16"), _rounded("float16"), 1e-3
    ),
    "growing-raw-device": Cell(kvjax.policy("dynamic")),
    "ring-raw-device": Cell(
        kvjax.policy("sliding_window", window=7, slack=4), sight=lambda layer: (7, 0)
    ),
    "ring-without-slack-raw-device": Cell(
        kvjax.policy("sliding_window", window=5, slack=0), sight=lambda layer: (5, 0)
    ),
    "ring-sinks-raw-device": Cell(
        kvjax.policy("sliding_window", window=7, sinks=3, slack=4), sight=lambda layer: (7, 3)
    ),
    "ring-sinks-bfloat16-device": Cell(
        kvjax.policy("sliding_window", window=6, sinks=1, dtype="bfloat16"),
        _rounded("bfloat16"), 1e-3, lambda layer: (6, 1),
    ),
    "hybrid-raw-device": Cell(
        kvjax.policy("hybrid", slack=5), sight=lambda layer: ((None, 0), (9, 0))[layer]
    ),
    "dense-raw-host": Cell(kvjax.CachePolicy(placement=kvjax.Host(), block=8)),
    "growing-raw-host-1": Cell(
        kvjax.CachePolicy(kvjax.Growing(), placement=kvjax.Host(prefetch=1), block=8)
    ),
    "ring-sinks-raw-host-2": Cell(
        kvjax.CachePolicy(kvjax.Ring(7, sinks=3, slack=17), placement=kvjax.Host(2), block=8),
        sight=lambda layer: (7, 3),
    ),
    "listed-raw-device": Cell(
        [
            kvjax.CachePolicy(kvjax.Ring(6, sinks=2), kvjax.Raw("float32")),
            kvjax.CachePolicy(kvjax.Dense()),
        ],
        sight=lambda layer: ((6, 2), (None, 0))[layer],
    ),
}  # fmt: skip


CODECS: dict[str, Any] = {
    "int8": kvjax.Int8(),
    "int4": kvjax.Int4("channel", zero_point=True),
    "int3": kvjax.Int3("token", 4),
    "int2": kvjax.Int2("channel", zero_point=True),
    "int1": kvjax.Int1(zero_point=True),
    "int8-head": kvjax.Int8("head", zero_point=True),
    "int4-tensor": kvjax.Int4("tensor"),
    "float8": kvjax.Float8(),
    "float8-wide": kvjax.Float8("e5m2", "channel"),
    "half-quadratic": kvjax.HalfQuadratic(kvjax.Int4(zero_point=True)),
    "rotated": kvjax.Rotated(kvjax.Int4()),
    "unrotated": kvjax.Unrotated(kvjax.Int8("channel")),
    "centred": kvjax.Centred(kvjax.Rotated(kvjax.Int4())),
    "unrotated-centred": kvjax.Unrotated(kvjax.Centred(kvjax.Int4())),
}
"""Every codec of blocks, and wrappings of wrappings."""

BLOCK = 8
"""Tokens of a block, in the cells: small, so that short texts have many."""

LAYOUTS: dict[str, tuple[Any, Any]] = {
    "dense": (kvjax.Dense(), (None, 0)),
    "growing": (kvjax.Growing(), (None, 0)),
    "ring": (kvjax.Ring(20, slack=15), (20, 0)),
    "narrow": (kvjax.Ring(5, slack=15), (5, 0)),
    "sinks": (kvjax.Ring(19, sinks=3, slack=17), (19, 3)),
}
"""Layouts, and the window and the sinks that they leave to be seen."""


def _coded_cells() -> dict[str, Cell]:
    """Every codec on every layout: two a cell, as the model has two layers; on one of them the
    values are another's, and on every second pair the window is the layer's own (hybrid)."""
    names, cells = list(CODECS), {}
    pairs = [(names[i], names[(i + 1) % len(names)]) for i in range(0, len(names), 2)]

    def cell(layout: str, pair: tuple[str, str], recent: int, place: Any) -> Cell:
        made, sight = LAYOUTS[layout]
        keys = [CODECS[name] for name in pair]
        values = [CODECS[pair[1]], CODECS[pair[1]]]
        policies = [
            kvjax.CachePolicy(made, k, v, place, block=BLOCK, recent=recent)
            for k, v in zip(keys, values, strict=True)
        ]
        return Cell(
            policies,
            tolerance=1e-3,
            sight=lambda layer: sight,
            coded=lambda layer: naive.Coded(
                BLOCK, recent, codes(keys[layer]), codes(values[layer]), keys[layer].before_rotary
            ),
        )

    for layout in LAYOUTS:
        for number, pair in enumerate(pairs):
            made = cell(layout, pair, number % 3, kvjax.Device())
            cells[f"{layout}-{'-'.join(pair)}-device"] = made
    # All others on the host are held against those on the device, exactly, in test_placement.py.
    for prefetch, layout in enumerate(("dense", "growing", "sinks")):
        made = cell(layout, pairs[prefetch], 1, kvjax.Host(prefetch))
        cells[f"{layout}-{'-'.join(pairs[prefetch])}-host-{prefetch}"] = made
    raw, int4 = kvjax.Raw(), CODECS["int4"]
    mixed = kvjax.CachePolicy(kvjax.Dense(), raw, int4, block=BLOCK)
    sliding = kvjax.CachePolicy(kvjax.Ring(slack=15), int4, raw, block=BLOCK)
    both = [(raw, int4), (int4, raw)]
    cells["hybrid-raw-and-int4-device"] = Cell(
        kvjax.Hybrid(mixed, sliding), tolerance=1e-3,
        sight=lambda layer: ((None, 0), (9, 0))[layer],
        coded=lambda layer: naive.Coded(BLOCK, 1, *map(codes, both[layer]), False),
    )  # fmt: skip
    return cells


def codes(codec: Any) -> Any:
    """What a codec does to a block of float32 numbers [kv_heads, block, head_dim]."""
    codec = codec.resolve("float32", jax.default_backend())
    there_and_back = jax.jit(lambda x: codec.decode(codec.encode(x)))

    def coded(x: np.ndarray) -> np.ndarray:
        return np.asarray(there_and_back(jnp.asarray(x, jnp.float32)[None, :, None]))[0, :, 0]

    return coded


FULL = os.environ.get("KVJAX_FULL") == "1"
"""Whether every cell is asked for (``.ci/run --full``)."""


def cells(names: Iterable[str], *, one_in: int, first: int = 0) -> list[Any]:
    """Parameters of a law whose cells take long to compile: some of them, and in a full run all."""
    left = pytest.mark.skip(reason="one of the cells of a full run (KVJAX_FULL=1, .ci/run --full)")
    return [
        pytest.param(name, marks=() if FULL or number % one_in == first % one_in else (left,))
        for number, name in enumerate(names)
    ]


CODED = _coded_cells()
"""The cells of codecs that stand behind a tail."""
CELLS |= CODED


def tiny_config(**changes: Any) -> LlamaConfig:
    """A grouped-query decoder small enough for float64 numpy; one layer in two has a window."""
    settings: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": True, "qkv_bias": False, "output_bias": False, "mlp_bias": False,
        "qk_norm": False, "rope": RopeConfig(), "windows": (None, 9), "dtype": "float32",
    }  # fmt: skip
    return LlamaConfig(**{**settings, **changes})


def tiny_model(**changes: Any) -> tuple[Architecture, Any]:
    """An architecture, and parameters large enough that attention is not uniform."""
    model = Architecture(tiny_config(**changes))
    params = model.init_params(0)
    return model, jax.tree.map(lambda x: x if x.ndim == 1 else 8 * x, params)
