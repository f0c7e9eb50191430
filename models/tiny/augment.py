"""Training text in which names must be looked up: rare words renamed, stretches repeated.

A few megabytes are seen many times, and a model soon knows every name in them by heart. Of a text
that it has never seen it must find the names in the text itself, at any distance. Both functions
here make training ask for that: a document's rare words get other names in every pass, the same
wherever they stand in it, and some windows hold a stretch of themselves twice.
"""

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

WORD = re.compile(r"[A-Z]?[a-z]{3,}|[A-Z]{4,}")
"""A word, or a part of an identifier in camel case or with underscores."""


class Renamer:
    """Gives the rare words of a document other words of the same pool.

    Args:
      texts: the documents; a word is rare if it stands at least twice, in at most ``spread`` of
        them.
      share: the probability that a rare word of a document is renamed.
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
        """The text with some of its rare words renamed, each the same throughout."""
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
    """Windows of which a share holds a stretch of itself twice, anywhere behind its first place.

    Args:
      windows: int32[windows, length] of token ids.
      share: of the windows that are changed.
      least, most: tokens of a stretch.

    Returns:
      int32[windows, length]: a copy; of a changed window the later place is written over.
    """
    made, length = windows.copy(), windows.shape[1]
    most = min(most, length // 2)
    for row in np.flatnonzero(rng.random(len(made)) < share):
        size = int(rng.integers(min(least, most), most + 1))
        first = int(rng.integers(0, length - 2 * size + 1))
        second = int(rng.integers(first + size, length - size + 1))
        made[row, second : second + size] = made[row, first : first + size]
    return made
