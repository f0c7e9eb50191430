"""The text part of Gemma 4 (Google, 2026).

Layers with full attention have larger heads than layers with sliding windows, and rotate a quarter
of their channels. Values may be the keys before their norm. The last layers reuse the keys and
values of earlier layers. Some models add experts in parallel with the dense feed-forward module.

Attributes have the same names as the tensors in Transformers.
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
    """Top-k router. The selected probabilities are normalized to sum to 1, then multiplied by a
    learned scale per expert."""

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
        probabilities = jax.nn.softmax(self.proj(normed).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(probabilities, self.choices)
        parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        scale = self.per_expert_scale[...][chosen].astype(jnp.float32)
        return chosen, parts * scale


class Block(gemma_parts.PerLayerInputBlock):
    """One layer."""

    def __init__(self, config: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        def hidden_norm() -> gemma_parts.RMSNorm:
            return norm(config, config.hidden_size)

        windowed = config.windows[layer] is not None
        self.self_attn = gemma_parts.Attention(
            config, layer, has_values=windowed or not config.keys_are_values, rngs=rngs
        )
        self.mlp = gemma_parts.FeedForward(config, layer, rngs=rngs)
        self.input_layernorm = hidden_norm()
        self.post_attention_layernorm = hidden_norm()
        self.pre_feedforward_layernorm = hidden_norm()
        self.post_feedforward_layernorm = hidden_norm()
        self.layer_scalar = nnx.Param(jnp.ones(1, config.dtype))
        self.has_per_layer_input, self.has_experts = config.layer_inputs > 0, config.num_experts > 0
        if self.has_per_layer_input:
            self.make_per_layer_input(config, layer, rngs)
        if self.has_experts:
            self.router, self.experts = Router(config, rngs=rngs), Experts(config, rngs=rngs)
            self.post_feedforward_layernorm_1 = hidden_norm()
            self.post_feedforward_layernorm_2 = hidden_norm()
            self.pre_feedforward_layernorm_2 = hidden_norm()

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        attention_output, context = self.self_attn(self.input_layernorm(x), context)
        x = x + self.post_attention_layernorm(attention_output)
        mlp_output = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            mlp_output = self.post_feedforward_layernorm_1(mlp_output) + self._expert_output(x)
        x = x + self.post_feedforward_layernorm(mlp_output)
        if self.has_per_layer_input:
            x = x + self.per_layer_input(x, context)
        return x * along(self.layer_scalar, x), context

    def _expert_output(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        chosen, parts = self.router(rows)
        output = self.experts(self.pre_feedforward_layernorm_2(rows), chosen, parts)
        return self.post_feedforward_layernorm_2(output).reshape(x.shape)


class Gemma4(gemma_parts.Decoder):
    """The text part of Gemma 4 with its language-model head."""

    block: ClassVar = Block
