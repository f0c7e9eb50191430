"""Keys stored before the rotary embedding, and turned when they are read."""

from dataclasses import dataclass

from kvjax.codecs._wrapping import Wrapping
from kvjax.codecs.codec import Codec


@dataclass(frozen=True)
class Unrotated(Wrapping):
    """Store keys as the model made them, without their positions (KVQuant, Hooper et al.,
    arXiv:2401.18079): a channel's numbers then lie closer together, and a bias stays one. They are
    turned to their positions block by block, whenever they are read.

    Of use for keys; values have no positions and are stored as ``codec`` does.
    """

    @property
    def before_rotary(self) -> bool:
        """Keys are given unrotated."""
        return True

    # The keys have no positions yet: they are decoded, and the wrapped codec's products left aside.
    scores = Codec.scores
