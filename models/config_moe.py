"""Configurations of models with experts."""

import re
from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar

from .config import DecoderConfig


@dataclass(frozen=True)
class MoeConfig(DecoderConfig):
    """A decoder with mixture-of-experts feed-forward layers.

    Attributes:
      norm_topk_prob: whether the weights of a token's experts are normalized to sum to 1.
      dense_layers: the indices of layers with an ordinary feed-forward part.

    Example:
      ```python
      experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
      config = models.MoeConfig(**vars(lm.config), **experts, norm_topk_prob=True)
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()

    names: ClassVar = replace(DecoderConfig.names, experts="apart")


@dataclass(frozen=True)
class MixtralConfig(MoeConfig):
    """A Mixtral model, whose files name tensors differently from other models with experts.

    Example:
      ```python
      experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
      config = models.MixtralConfig(**vars(lm.config), **experts, norm_topk_prob=True)
      params = models.Architecture(config).abstract_params()
      ```
    """

    names: ClassVar = replace(
        MoeConfig.names,
        renamed=(
            (re.compile(r"\.block_sparse_moe\."), ".mlp."),
            (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
            (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
            (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
        ),
        written=(
            (re.compile(r"\.mlp\."), ".block_sparse_moe."),
            (re.compile(r"\.gate_proj\."), ".w1."),
            (re.compile(r"\.down_proj\."), ".w2."),
            (re.compile(r"\.up_proj\."), ".w3."),
        ),
    )


@dataclass(frozen=True)
class Llama4Config(MoeConfig):
    """The text part of Llama 4. ``windows`` are chunk sizes: a query sees only its own chunk.

    Attributes:
      use_qk_norm: whether layers with rotary positions normalize queries and keys (RMS, no weight).
      attn_temperature: in layers without rotary positions, queries are scaled by
        ``1 + factor * log(1 + floor((position + 1) / step))``. This is (factor, step), or None.
      intermediate_size: the feed-forward width of ``dense_layers``.

    Example:
      ```python
      experts = dict(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=32)
      own = dict(rope_layers=(True,) * 4, use_qk_norm=True, attn_temperature=None)
      config = models.Llama4Config(**vars(lm.config) | experts | own, norm_topk_prob=False)
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    use_qk_norm: bool
    attn_temperature: tuple[float, int] | None

    names: ClassVar = replace(
        DecoderConfig.names,
        experts="joined",
        renamed=((re.compile(r"\.feed_forward\."), ".mlp."),),
        written=((re.compile(r"\.mlp\."), ".feed_forward."),),
    )
