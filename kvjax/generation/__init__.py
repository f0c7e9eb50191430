"""Text generation from prompts: requests, sessions, compiled programs and results."""

from kvjax.generation.aot.compiling import Compiled
from kvjax.generation.batches import Batch
from kvjax.generation.scoring import Scored

__all__ = ["Batch", "Compiled", "Scored"]
