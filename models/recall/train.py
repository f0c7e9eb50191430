"""Train the model that remembers: ``python -m kvjax.models.recall.train``.

The optimizer, its schedule and the step are those of the embedded model
(``kvjax.models.tiny.train``); the text is made up as it goes, and only what can be known counts.
Stopped at any time, the same command goes on from the last checkpoint.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from ..architecture import Architecture, Params
from ..tiny.export import export
from ..tiny.recipe import Recipe
from ..tiny.train import Trainer
from . import FOLDER
from .task import VOCABULARY, lesson

RECIPE = Recipe(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, layers=2, heads=2, kv_heads=2,
    head_dim=64, context=1024, rows=3, steps=2000, weight_decay=0.0, other_rate=0.0025,
    renamed=0.0, repeated=0.0,
)  # fmt: skip

STAGES = {
    0.0: (8, 24), 0.12: (16, 36), 0.18: (32, 48), 0.24: (64, 72), 0.27: (128, 144),
    0.3: (256, 288), 0.34: (256, 512), 0.38: (256, 1024),
}  # fmt: skip
"""Keys, and tokens of a text, from each part of the steps on. With all the keys from the start the
two layers never learn to find one (1.2 nats for millions of tokens); with eight they do in a
hundred steps, and each doubling then costs a few tens."""


class Lessons:
    """The windows of each step, the same whenever they are asked for."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def batch(self, step: int) -> np.ndarray:
        """int32[rows, length + 1], as many tokens in every step."""
        recipe = self.recipe
        begun = max(part for part in STAGES if part <= step / recipe.steps)
        keys, length = STAGES[begun]
        rng = np.random.default_rng([recipe.seed, step])
        return lesson(rng, recipe.rows * recipe.context // length, length + 1, keys)


def recall_loss(
    architecture: Architecture, params: Params, windows: Int[Array, "rows length"]
) -> Array:
    """Mean nats of the values whose keys stood in the text before."""
    logits = architecture.apply(params, windows[:, :-1])[:, ::2]
    keys, values = windows[:, :-1:2], windows[:, 1::2]
    earlier = jnp.tril(jnp.ones((keys.shape[1],) * 2, bool), -1)
    known = jnp.any((keys[:, :, None] == keys[:, None, :]) & earlier, axis=-1)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, values)
    return jnp.mean(nats, where=known)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvjax.models.recall.train")
    cache = Path.home() / ".cache" / "kvjax" / "recall"
    parser.add_argument("--workdir", type=Path, default=cache, help="checkpoints (%(default)s)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the model's folder (%(default)s)")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(RECIPE, given.workdir, save_every=500, loss=recall_loss)
    for step, loss in trainer.run(Lessons(RECIPE)):
        if step % 100 == 0:
            print(f"step {step}: {loss:.4f} nats", flush=True)
    export(trainer.state["params"], RECIPE.config(), given.out)
    trainer.close()


if __name__ == "__main__":
    main()
