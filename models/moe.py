"""Mixtures of experts: Mixtral and the sparse models of Qwen 3.

Each token goes through the ``num_experts_per_tok`` feed-forward layers whose router gives it the
highest probabilities, which weight what they give (Shazeer et al., arXiv:1701.06538; Jiang et al.,
arXiv:2401.04088; Qwen 3, arXiv:2505.09388). The experts' matrices stand in stacks
[experts, out, in]; files have them one by one (``models/experts.py``).
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from . import decoder
from .config import DecoderConfig
from .config_families import Gemma4Config, MoeConfig
from .layers import ACTIVATIONS, Hidden, Linear, contract_last, normal

Rows = Float[Array, "tokens hidden"]


class Matrices(nnx.Module):
    """One matrix of every expert: ``weight`` [experts, out, in]."""

    def __init__(self, experts: int, fan_in: int, fan_out: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (experts, fan_out, fan_in), dtype))


class Experts(nnx.Module):
    """``down(act(gate(x)) * up(x))`` of many experts.

    Few tokens read the matrices that they chose alone, which are copied for it; where there are at
    least as many choices as experts, every expert takes all tokens, one expert after the other:
    ``num_experts / num_experts_per_tok`` times the products that are needed, and no more memory
    than one expert's. ``scales_inputs``: parts multiply what an expert takes, not what it gives.
    """

    def __init__(
        self, config: MoeConfig | Gemma4Config, *, scales_inputs: bool = False, rngs: nnx.Rngs
    ):
        self.activation, self.scales_inputs = ACTIVATIONS[config.hidden_act], scales_inputs
        hidden, inner = config.hidden_size, config.moe_intermediate_size

        def matrices(fan_in: int, fan_out: int) -> Matrices:
            return Matrices(config.num_experts, fan_in, fan_out, dtype=config.dtype, rngs=rngs)

        self.gate_proj = matrices(hidden, inner)
        self.up_proj = matrices(hidden, inner)
        self.down_proj = matrices(inner, hidden)

    def __call__(
        self, x: Rows, chosen: Int[Array, "tokens choices"], parts: Float[Array, "tokens choices"]
    ) -> Rows:
        """The sum of the chosen experts, weighted by ``parts`` (float32)."""
        weights = tuple(each.weight[...] for each in (self.gate_proj, self.up_proj, self.down_proj))
        few = chosen.size < weights[0].shape[0]
        return (self._few if few else self._many)(x, weights, chosen, parts).astype(x.dtype)

    def _scales(self, parts: Array) -> tuple[Array, Array]:
        """What an expert's inputs and outputs are multiplied by."""
        ones = jnp.ones_like(parts)
        return (parts, ones) if self.scales_inputs else (ones, parts)

    def _few(self, x: Rows, weights: Any, chosen: Array, parts: Array) -> Rows:
        gate, up, down = (weight[chosen] for weight in weights)

        def products(y: Array, each: Array) -> Array:
            found = jnp.einsum("tki,tkoi->tko", y, each, preferred_element_type=jnp.float32)
            return found.astype(x.dtype)

        before, behind = self._scales(parts[..., None])
        y = (x[:, None].astype(before.dtype) * before).astype(x.dtype)
        y = self.activation(products(y, gate)) * products(y, up)
        return jnp.sum(products(y, down).astype(jnp.float32) * behind, axis=1)

    def _many(self, x: Rows, weights: Any, chosen: Array, parts: Array) -> Rows:
        tokens, experts = x.shape[0], weights[0].shape[0]
        rows = jnp.arange(tokens, dtype=jnp.int32)[:, None]
        shares = jnp.zeros((tokens, experts), jnp.float32).at[rows, chosen].set(parts)

        def add(total: Array, one: Any) -> tuple[Array, None]:
            (gate, up, down), share = one
            before, behind = self._scales(share[:, None])
            y = (x.astype(before.dtype) * before).astype(x.dtype)
            gated = self.activation(contract_last(y, gate).astype(x.dtype))
            y = gated * contract_last(y, up).astype(x.dtype)
            y = contract_last(y, down).astype(x.dtype).astype(jnp.float32) * behind
            # What no one chose may be infinite, and would be NaN times 0.
            return total + jnp.where(share[:, None] != 0, y, 0), None

        return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (weights, shares.T))[0]


class SparseFeedForward(nnx.Module):
    """A router, ``gate``, and the experts that it chooses among."""

    def __init__(self, config: MoeConfig, *, rngs: nnx.Rngs):
        self.choices, self.norm = config.num_experts_per_tok, config.norm_topk_prob
        self.gate = Linear(
            config.hidden_size, config.num_experts, bias=False, dtype=config.dtype, rngs=rngs
        )
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        chances = jax.nn.softmax(self.gate(rows).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(chances, self.choices)
        if self.norm:
            parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        return self.experts(rows, chosen, parts).reshape(x.shape)


class Block(decoder.Block):
    """One layer; some have a feed-forward part without experts."""

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.Feeding:
        assert isinstance(config, MoeConfig)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return SparseFeedForward(config, rngs=rngs)


class Moe(decoder.Decoder):
    """A decoder with experts, and its language-model head; experts are divided as one is."""

    block: ClassVar = Block
