"""The text part of Gemma 4 (Google, 2026).

Layers that see everything have larger heads than those with a window, of which a quarter of the
channels is turned; values may be the keys before their norm; the last layers read keys and values
of earlier ones; experts may stand beside a feed-forward part that all tokens go through.

Attributes bear the names that Transformers gives its tensors.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from . import gemma_parts
from .config import Gemma4Config
from .frame import LayerContext
from .gemma_parts import linear, norm
from .layers import Hidden, along, unit
from .moe import Experts


class Router(nnx.Module):
    """Which experts a token goes through, and in what parts: the highest probabilities, made to add
    up to 1, each then by its expert's own scale."""

    def __init__(self, config: Gemma4Config, *, rngs: nnx.Rngs):
        self.choices, self.epsilon = config.num_experts_per_tok, config.rms_norm_eps
        self.proj = linear(config, config.hidden_size, config.num_experts, rngs)
        self.scale = nnx.Param(jnp.ones(config.hidden_size, config.dtype))
        self.per_expert_scale = nnx.Param(jnp.ones(config.num_experts, config.dtype))

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        normed = unit(x, self.epsilon).astype(x.dtype)
        normed = normed * along(self.scale, normed) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        chances = jax.nn.softmax(self.proj(normed).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(chances, self.choices)
        parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        scale = self.per_expert_scale[...][chosen].astype(jnp.float32)
        return chosen, parts * scale


class Block(gemma_parts.GivenBlock):
    """One layer."""

    def __init__(self, config: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        def of_hidden() -> gemma_parts.RMSNorm:
            return norm(config, config.hidden_size)

        windowed = config.windows[layer] is not None
        self.self_attn = gemma_parts.Attention(
            config, layer, has_values=windowed or not config.keys_are_values, rngs=rngs
        )
        self.mlp = gemma_parts.FeedForward(config, layer, rngs=rngs)
        self.input_layernorm = of_hidden()
        self.post_attention_layernorm = of_hidden()
        self.pre_feedforward_layernorm = of_hidden()
        self.post_feedforward_layernorm = of_hidden()
        self.layer_scalar = nnx.Param(jnp.ones(1, config.dtype))
        self.has_given, self.has_experts = config.layer_inputs > 0, config.num_experts > 0
        if self.has_given:
            self.make_given(config, layer, rngs)
        if self.has_experts:
            self.router, self.experts = Router(config, rngs=rngs), Experts(config, rngs=rngs)
            self.post_feedforward_layernorm_1 = of_hidden()
            self.post_feedforward_layernorm_2 = of_hidden()
            self.pre_feedforward_layernorm_2 = of_hidden()

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        mixed, context = self.self_attn(self.input_layernorm(x), context)
        x = x + self.post_attention_layernorm(mixed)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            fed = self.post_feedforward_layernorm_1(fed) + self._of_experts(x)
        x = x + self.post_feedforward_layernorm(fed)
        if self.has_given:
            x = x + self.given(x, context)
        return x * along(self.layer_scalar, x), context

    def _of_experts(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        chosen, parts = self.router(rows)
        found = self.experts(self.pre_feedforward_layernorm_2(rows), chosen, parts)
        return self.post_feedforward_layernorm_2(found).reshape(x.shape)


class Gemma4(gemma_parts.Decoder):
    """The text part of Gemma 4 with its language-model head."""

    block: ClassVar = Block
