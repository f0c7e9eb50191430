"""Tokenize the documents and cut them into training windows."""

import numpy as np
import tokenizers

from kvjax.generation.loaded_model import LanguageModel

from .augment import Renamer, repeat_stretches
from .corpus import read_parts
from .recipe import Recipe
from .tokenization import END


class Data:
    """The tokens of the training and validation documents, in windows."""

    def __init__(
        self, texts: dict[str, dict[str, str]], tokenizer: tokenizers.Tokenizer, recipe: Recipe
    ):
        self.recipe, self.tokenizer, self.texts = recipe, tokenizer, texts["train"]
        self.renamer = Renamer(self.texts.values(), share=recipe.renamed)
        stream = np.concatenate(encode(tokenizer, texts["validation"]))
        count = (len(stream) - 1) // recipe.context
        tokens = sum(map(len, encode(tokenizer, self.texts)))
        # Renaming changes the number of tokens slightly, but all epochs have as many windows.
        self.per_epoch = int(0.95 * tokens) // recipe.context - 1
        if self.per_epoch < 1 or not count:
            raise ValueError(f"too little text for windows of {recipe.context} tokens")
        self.validation = _windows(stream, 0, count, recipe.context)
        self._epochs: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        """The windows of a step, int32[rows, context + 1]. Deterministic."""
        rows = self.recipe.rows
        picked = [divmod(i, self.per_epoch) for i in range(step * rows, (step + 1) * rows)]
        return np.stack([self._epoch(epoch)[at] for epoch, at in picked])

    def _epoch(self, number: int) -> np.ndarray:
        """The windows of an epoch: documents are renamed, reordered and cut at new offsets, and the
        windows are shuffled."""
        if number not in self._epochs:
            context, rng = self.recipe.context, np.random.default_rng([self.recipe.seed, number])
            renamed = {name: self.renamer.rename(text, rng) for name, text in self.texts.items()}
            documents = encode(self.tokenizer, renamed)
            stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
            spare = len(stream) - 1 - self.per_epoch * context
            if spare < 1:
                stream, spare = np.resize(stream, len(stream) + 1 - spare), 1
            cut = int(rng.integers(spare))
            windows = _windows(stream, cut, self.per_epoch, context)
            windows = repeat_stretches(windows, self.recipe.repeated, rng)
            self._epochs = {k: v for k, v in self._epochs.items() if k == number - 1}
            self._epochs[number] = windows[rng.permutation(len(windows))]
        return self._epochs[number]


def encode(tokenizer: tokenizers.Tokenizer, texts: dict[str, str]) -> list[np.ndarray]:
    """The token ids of each document, int32[tokens], starting with ``END``."""
    encoded = tokenizer.encode_batch([END + text for text in texts.values()])
    return [np.array(one.ids, np.int32) for one in encoded]


def part_tokens(part: str, lm: LanguageModel) -> list[int]:
    """The concatenated token ids of a part's documents, with the model's own tokenizer."""
    if lm.tokenizer is None:
        raise ValueError(f"{lm.source} has no tokenizer")
    documents = encode(lm.tokenizer.backend, read_parts()[part])
    return [int(token) for document in documents for token in document]


def _windows(stream: np.ndarray, start: int, count: int, context: int) -> np.ndarray:
    at = start + context * np.arange(count)[:, None] + np.arange(context + 1)
    return stream[at]
