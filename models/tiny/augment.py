"""Data augmentation that makes the model copy from its context: renamed words, repeated passages.

The training text is only a few megabytes, and the model sees it several times. Without augmentation
it memorizes the names, but for unseen text it must look them up in the context, at any distance.
Therefore each epoch replaces some rare words of a document by other words, consistently within the
document, and some windows contain a passage twice.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

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
    made, length = windows.copy(), windows.shape[1]
    most = min(most, length // 2)
    for row in np.flatnonzero(rng.random(len(made)) < share):
        size = int(rng.integers(min(least, most), most + 1))
        first = int(rng.integers(0, length - 2 * size + 1))
        second = int(rng.integers(first + size, length - size + 1))
        made[row, second : second + size] = made[row, first : first + size]
    return made
