"""Keys stored before the rotary embedding."""

from dataclasses import dataclass

from kvjax.codecs.codec import Codec
from kvjax.codecs.wrapper import CodecWrapper


@dataclass(frozen=True)
class Unrotated(CodecWrapper):
    """Store keys before the rotary embedding is applied (KVQuant, Hooper et al., arXiv:2401.18079).

    Before rotation the values of a channel lie closer together, and a bias is constant. Attention
    rotates the keys to their positions each time it reads a block.

    Use it for keys. Values have no positions, so they are stored as ``codec`` stores them.
    """

    @property
    def before_rotary(self) -> bool:
        """Always true: ``encode`` receives unrotated keys."""
        return True

    # Stored keys must be decoded and rotated first, so the products of ``codec`` do not apply.
    scores = Codec.scores
