"""Documents as tokens, and the windows of them that a training step sees."""

import numpy as np
import tokenizers

from .recipe import Recipe
from .tokenization import END


class Data:
    """The tokens of the training and validation documents, in windows."""

    def __init__(
        self, texts: dict[str, dict[str, str]], tokenizer: tokenizers.Tokenizer, recipe: Recipe
    ):
        self.recipe = recipe
        self.documents = encode(tokenizer, texts["train"])
        stream = np.concatenate(encode(tokenizer, texts["validation"]))
        count = (len(stream) - 1) // recipe.context
        if sum(map(len, self.documents)) <= 2 * recipe.context or not count:
            raise ValueError(f"too little text for windows of {recipe.context} tokens")
        self.validation = _windows(stream, 0, count, recipe.context)
        self._epochs: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        """int32[rows, context + 1], the same whenever it is asked for."""
        rows = self.recipe.rows
        per_epoch = len(self._epoch(0))
        picked = [divmod(i, per_epoch) for i in range(step * rows, (step + 1) * rows)]
        return np.stack([self._epoch(epoch)[at] for epoch, at in picked])

    def _epoch(self, number: int) -> np.ndarray:
        """All windows of one pass: documents in a new order, cut at new places, shuffled."""
        if number not in self._epochs:
            context = self.recipe.context
            rng = np.random.default_rng([self.recipe.seed, number])
            order = rng.permutation(len(self.documents))
            stream = np.concatenate([self.documents[i] for i in order])
            windows = _windows(
                stream, int(rng.integers(context)), (len(stream) - 1) // context - 1, context
            )
            self._epochs = {k: v for k, v in self._epochs.items() if k in (0, number - 1)}
            self._epochs[number] = windows[rng.permutation(len(windows))]
        return self._epochs[number]


def encode(tokenizer: tokenizers.Tokenizer, texts: dict[str, str]) -> list[np.ndarray]:
    """Token ids of documents, each after ``END``: int32[tokens] each."""
    encoded = tokenizer.encode_batch([END + text for text in texts.values()])
    return [np.array(one.ids, np.int32) for one in encoded]


def _windows(stream: np.ndarray, start: int, count: int, context: int) -> np.ndarray:
    at = start + context * np.arange(count)[:, None] + np.arange(context + 1)
    return stream[at]
