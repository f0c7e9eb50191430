"""Train the model that remembers: ``python -m kvjax.models.recall.train``.

The optimizer, its schedule and the step are those of the embedded model
(``kvjax.models.tiny.train``); the text is made up as it goes, and only what can be known counts.
Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ..architecture import Architecture, Params
from ..tiny.export import export
from ..tiny.recipe import Recipe
from ..tiny.train import Trainer, token_losses
from . import FOLDER
from .task import VOCABULARY, lesson

RECIPE = Recipe(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, layers=2, heads=4, kv_heads=2,
    head_dim=64, context=2048, rows=2, steps=1500, renamed=0.0, repeated=0.0,
)  # fmt: skip


class Lessons:
    """The windows of each step, the same whenever they are asked for."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def batch(self, step: int) -> np.ndarray:
        """int32[rows, context + 1]."""
        rng = np.random.default_rng([self.recipe.seed, step])
        return lesson(rng, self.recipe.rows, self.recipe.context + 1)


def recall_loss(
    architecture: Architecture, params: Params, windows: Int[Array, "rows length"]
) -> Array:
    """Mean nats of the values whose keys stood in the text before."""
    keys = windows[:, :-1:2]
    earlier = jnp.tril(jnp.ones((keys.shape[1],) * 2, bool), -1)
    known = jnp.any((keys[:, :, None] == keys[:, None, :]) & earlier, axis=-1)
    return jnp.mean(token_losses(architecture, params, windows)[:, ::2], where=known)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.recall.train")
    cache = Path.home() / ".cache" / "kvjax" / "recall"
    parser.add_argument("--workdir", type=Path, default=cache, help="checkpoints (%(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model's folder (%(default)s)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(RECIPE, given.workdir, save_every=100, loss=recall_loss)
    for step, loss in trainer.run(Lessons(RECIPE)):
        if step % 25 == 0:
            print(f"step {step}: {loss:.4f} nats", flush=True)
    export(trainer.state["params"], RECIPE.config(), given.out)
    trainer.close()


if __name__ == "__main__":
    main()
