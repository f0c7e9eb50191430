"""The embedded model's architecture and training hyperparameters."""

from dataclasses import dataclass

import jax
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, PyTree
from optax.contrib import MuonDimensionNumbers, muon

from ..architecture import Params
from ..config import LlamaConfig, RopeConfig


@dataclass(frozen=True)
class Recipe:
    """The architecture and the training hyperparameters.

    A step has ``rows`` windows of ``context`` tokens. ``decay`` is the fraction of steps, at the
    end, in which the learning rate decays. ``renamed`` is the fraction of a document's rare words
    that are replaced in each epoch. ``repeated`` is the fraction of windows that contain a passage
    twice.
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 2048
    rows: int = 1
    steps: int = 3200
    warmup: int = 40
    decay: float = 0.5
    matrix_rate: float = 0.005
    other_rate: float = 0.0025
    weight_decay: float = 0.2
    renamed: float = 0.6
    repeated: float = 0.25
    seed: int = 0

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            model_type="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.context,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            tie_word_embeddings=True,
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=False,
            rope=RopeConfig(theta=10000.0),
            windows=(None,) * self.layers,
        )


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Create the optimizer: Muon for two-dimensional parameters other than embeddings, and AdamW
    for the others."""

    def rate(peak: float) -> optax.Schedule:
        falling = max(1, round(recipe.decay * recipe.steps))
        return optax.join_schedules(
            [
                optax.linear_schedule(peak / recipe.warmup, peak, recipe.warmup),
                optax.constant_schedule(peak),
                optax.linear_schedule(peak, 0.0, falling),
            ],
            [recipe.warmup, max(recipe.warmup, recipe.steps - falling)],
        )

    def matrices(params: PyTree) -> PyTree:
        def choose(path: KeyPath, x: Array) -> MuonDimensionNumbers | None:
            is_matrix = x.ndim == 2 and "embed_tokens" not in jax.tree_util.keystr(path)
            return MuonDimensionNumbers() if is_matrix else None

        return jax.tree_util.tree_map_with_path(choose, params)

    def decayed(params: Params) -> Params:
        return jax.tree.map(lambda x: x.ndim == 2, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            rate(recipe.matrix_rate),
            weight_decay=recipe.weight_decay,
            weight_decay_mask=decayed,
            adam_b2=0.98,
            adam_weight_decay=recipe.weight_decay,
            adam_learning_rate=rate(recipe.other_rate),
            muon_weight_dimension_numbers=matrices,
            consistent_rms=0.2,
        ),
    )
