"""Training data: tokenizing the documents, augmenting them, and cutting them into windows.

The tokenizer is byte-level BPE, trained only on the training text.

The training text is only a few megabytes, and the model sees it several times. Without
augmentation, it memorizes the names in the text. For unseen text, however, it must look names up in
the context, at any distance. Therefore each epoch replaces some rare words of a document by other
words, consistently within the document, and some windows contain a passage twice.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from kvjax.generation.loaded_model import LanguageModel

from .corpus import read_parts
from .recipe import Recipe

END = "<|endoftext|>"
"""The token that precedes every document. Its id is 0."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train BPE merges. The vocabulary contains ``END``, the 256 bytes, and the merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, context: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``.

    The tokenizer does not add a BOS token, because training windows and prompts may start anywhere
    in a document.
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": context,
        "pad_token": END,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


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
        # Renaming changes the number of tokens slightly, but all epochs have the same number of
        # windows.
        self.per_epoch = int(0.95 * tokens) // recipe.context - 1
        if self.per_epoch < 1 or not count:
            raise ValueError(f"too little text for windows of {recipe.context} tokens")
        self.validation = _windows(stream, 0, count, recipe.context)
        self._epochs: dict[int, np.ndarray] = {}

    def batch(self, step: int) -> np.ndarray:
        """Return the windows of a step, int32[rows, context + 1]. They are deterministic."""
        rows = self.recipe.rows
        picked = [divmod(i, self.per_epoch) for i in range(step * rows, (step + 1) * rows)]
        return np.stack([self._epoch(epoch)[at] for epoch, at in picked])

    def _epoch(self, number: int) -> np.ndarray:
        """Return the windows of an epoch. Words in the documents are replaced, the documents are
        reordered and cut at new offsets, and the windows are shuffled."""
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
    """Return the token ids of each document, int32[tokens], starting with ``END``."""
    encoded = tokenizer.encode_batch([END + text for text in texts.values()])
    return [np.array(one.ids, np.int32) for one in encoded]


def part_tokens(part: str, lm: LanguageModel) -> list[int]:
    """Return the concatenated token ids of a part's documents, with the model's own tokenizer."""
    if lm.tokenizer is None:
        raise ValueError(f"{lm.source} has no tokenizer")
    documents = encode(lm.tokenizer.backend, read_parts()[part])
    return [int(token) for document in documents for token in document]


def _windows(stream: np.ndarray, start: int, count: int, context: int) -> np.ndarray:
    at = start + context * np.arange(count)[:, None] + np.arange(context + 1)
    return stream[at]


WORD = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{4,}")
"""A word, or a part of an identifier in camel case or with underscores."""


class Renamer:
    """Replaces rare words of a document by other rare words.

    Args:
      texts: the documents.
      share: the probability that a rare word of a document is replaced.
      spread: a word is rare if it occurs at least twice, but in at most ``spread`` documents.
    """

    def __init__(self, texts: Iterable[str], *, share: float, spread: int = 4):
        documents, total = Counter[str](), Counter[str]()
        for text in texts:
            words = Counter(word.lower() for word in WORD.findall(text))
            documents.update(words.keys())
            total.update(words)
        self.share = share
        self.pool = sorted(w for w, n in documents.items() if n <= spread and total[w] > 1)
        self._rare = set(self.pool)

    def rename(self, text: str, rng: np.random.Generator) -> str:
        """Replace some rare words of a text, each consistently in the whole text."""
        mine = sorted(self._rare.intersection(word.lower() for word in WORD.findall(text)))
        chosen = [word for word in mine if rng.random() < self.share]
        others = rng.choice(len(self.pool), len(chosen), replace=False)
        names = {word: self.pool[at] for word, at in zip(chosen, others, strict=True)}

        def other(match: re.Match[str]) -> str:
            word = match[0]
            name = names.get(word.lower())
            if name is None:
                return word
            return name.upper() if word.isupper() else name.title() if word[0].isupper() else name

        return WORD.sub(other, text)


def repeat_stretches(
    windows: np.ndarray, share: float, rng: np.random.Generator, *, least: int = 32, most: int = 256
) -> np.ndarray:
    """Copy a random passage of some windows to a later place in the same window.

    Args:
      windows: int32[windows, length] of token ids.
      share: the fraction of windows to change.
      rng: the random number generator.
      least, most: the minimum and maximum length of a passage in tokens.

    Returns:
      int32[windows, length], a copy of ``windows`` in which the passages are overwritten.
    """
    result, length = windows.copy(), windows.shape[1]
    most = min(most, length // 2)
    for row in np.flatnonzero(rng.random(len(result)) < share):
        size = int(rng.integers(min(least, most), most + 1))
        first = int(rng.integers(0, length - 2 * size + 1))
        second = int(rng.integers(first + size, length - size + 1))
        result[row, second : second + size] = result[row, first : first + size]
    return result
