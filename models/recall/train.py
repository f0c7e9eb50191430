"""Train the key-value retrieval model: ``python -m kvjax.models.recall.train``.

Training uses the optimizer, schedule and step of the embedded model (``kvjax.models.tiny.train``).
The sequences are generated on the fly, and the loss includes only values that can be known from the
sequence. If training is interrupted, the same command resumes from the last checkpoint.
"""

import argparse
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int

from ..architecture import Architecture, Params
from ..tiny.recipe import Recipe
from ..tiny.train import Trainer, export
from . import FOLDER
from .measure import VOCABULARY, lesson

RECIPE = Recipe(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, layers=2, heads=2, kv_heads=2,
    head_dim=64, context=1024, rows=3, steps=2000, weight_decay=0.0, other_rate=0.0025,
    renamed=0.0, repeated=0.0,
)  # fmt: skip

STAGES = {
    0.0: (8, 24), 0.12: (16, 36), 0.18: (32, 48), 0.24: (64, 72), 0.27: (128, 144),
    0.3: (256, 288), 0.34: (256, 512), 0.38: (256, 1024),
}  # fmt: skip
"""A curriculum: the number of keys and the sequence length, by the fraction of training at which
they start. With all keys from the start, the two layers do not learn retrieval (the loss stays at
1.2 nats for millions of tokens). With eight keys they learn it in a hundred steps, and then each
doubling takes only a few tens of steps."""


class Lessons:
    """The training sequences of each step. They are deterministic."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe

    def batch(self, step: int) -> np.ndarray:
        """Return the sequences of a step, int32[rows, length + 1]. Every step has about the same
        number of tokens."""
        recipe = self.recipe
        stage = max(start for start in STAGES if start <= step / recipe.steps)
        keys, length = STAGES[stage]
        rng = np.random.default_rng([recipe.seed, step])
        return lesson(rng, recipe.rows * recipe.context // length, length + 1, keys)


def recall_loss(
    architecture: Architecture, params: Params, windows: Int[Array, "rows length"]
) -> Array:
    """Compute the mean loss, in nats, of the values whose keys occur earlier in the sequence."""
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
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(RECIPE, options.workdir, save_every=500, loss=recall_loss)
    for step, loss in trainer.run(Lessons(RECIPE)):
        if step % 100 == 0:
            print(f"step {step}: {loss:.4f} nats", flush=True)
    export(trainer.state["params"], RECIPE.config(), options.out)
    trainer.close()


if __name__ == "__main__":
    main()
