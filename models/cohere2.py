"""Cohere 2, such as Command R7B: parallel attention and feed-forward, with one norm for both.

Layers with a window have rotary positions, and the others have no positions (Cohere, "Command A",
arXiv:2504.00698). Attributes have the same names as the tensors in Transformers.
"""

from typing import ClassVar

from . import decoder
from .config import Cohere2Config, DecoderConfig
from .frame import LayerContext, Logits
from .layers import Hidden


class Block(decoder.Block):
    """One layer. Attention and feed-forward both read the normed input of the layer."""

    def make_norms(self, config: DecoderConfig) -> None:
        self.input_layernorm = decoder.make_norm(config, config.hidden_size)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        normed = self.input_layernorm(x)
        attention_output, context = self.self_attn(normed, context)
        return x + attention_output + self.mlp(normed), context


class Cohere2(decoder.Decoder):
    """Cohere 2 with its language-model head."""

    block: ClassVar = Block
    config: Cohere2Config

    def logits(self, x: Hidden) -> Logits:
        return super().logits(x) * self.config.logit_scale
