"""The law matrix: every policy that the laws are tested on. A new part joins by a line here."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.architecture import Architecture
from kvjax.models.config import LlamaConfig, RopeConfig


class Cell(NamedTuple):
    """A policy, what its codec does to a number, and how close its logits come to the truth.

    ``sight``: for a layer, the window and the sinks that the layout leaves to be seen.
    """

    policy: Any
    store: Any = lambda x: x
    tolerance: float = 1e-5
    sight: Any = lambda layer: (None, 0)


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
    "listed-raw-device": Cell(
        [
            kvjax.CachePolicy(kvjax.Ring(6, sinks=2), kvjax.Raw("float32")),
            kvjax.CachePolicy(kvjax.Dense()),
        ],
        sight=lambda layer: ((6, 2), (None, 0))[layer],
    ),
}  # fmt: skip


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
