"""The law matrix: every policy that the laws are tested on. A new part joins by a line here."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.models.architecture import Architecture
from kvjax.models.config import LlamaConfig, RopeConfig


class Cell(NamedTuple):
    """A policy, what its codec does to a number, and how close its logits come to the truth."""

    policy: kvjax.CachePolicy
    store: Any
    tolerance: float


def _rounded(dtype: str) -> Any:
    return lambda x: np.asarray(jnp.asarray(x, jnp.float32).astype(dtype), np.float64)


CELLS = {
    "dense-raw-device": Cell(kvjax.policy("static"), lambda x: x, 1e-5),
    "dense-bfloat16-device": Cell(
        kvjax.policy("static", dtype="bfloat16"), _rounded("bfloat16"), 1e-3
    ),
    "dense-float16-device": Cell(
        kvjax.policy("static", dtype="float16"), _rounded("float16"), 1e-3
    ),
}


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
