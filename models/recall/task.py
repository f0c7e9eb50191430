"""Facts, and questions about them: key-value retrieval in token ids.

A text is a row of pairs, a key and its value. The first pairs state facts, each key once; the
others ask: a key comes again, and its value can be told only by who still has the fact. Keys and
values are drawn anew for every text, so that nothing can be known by heart.
"""

import numpy as np

KEYS = 256
VALUES = 64
VOCABULARY = 1 + KEYS + VALUES
"""Token 0 stands for nothing; then come the keys, then the values."""


def quiz(rng: np.random.Generator, rows: int, facts: int, questions: int) -> np.ndarray:
    """Texts that state facts and then ask for some of them, in any order, none twice.

    Returns:
      int32[rows, 2 * (facts + questions)].

    Raises:
      ValueError: if there are more questions than facts, or more facts than keys.
    """
    if not 0 < questions <= facts <= KEYS:
        raise ValueError(
            f"{questions} questions about {facts} facts: there may be up to {KEYS} facts, and no "
            "more questions than facts"
        )
    return np.stack([_text(rng, facts, rng.permutation(facts)[:questions]) for _ in range(rows)])


def lesson(rng: np.random.Generator, rows: int, length: int, keys: int = KEYS) -> np.ndarray:
    """Texts to learn from: a few facts or many, each asked for again and again.

    Args:
      rng: what the texts are drawn with.
      rows: how many.
      length: tokens of each.
      keys: how many of the keys, the first ones, the facts are about.

    Returns:
      int32[rows, length].
    """
    texts = []
    for _ in range(rows):
        pairs = -(-length // 2)
        most = min(keys, pairs // 2)
        facts = int(np.exp(rng.uniform(np.log(most / 4), np.log(most + 1))))
        asked = rng.integers(facts, size=pairs - facts)
        texts.append(_text(rng, facts, asked, keys)[:length])
    return np.stack(texts)


def _text(rng: np.random.Generator, facts: int, asked: np.ndarray, keys: int = KEYS) -> np.ndarray:
    about = 1 + rng.permutation(keys)[:facts]
    values = 1 + KEYS + rng.integers(VALUES, size=facts)
    said = np.concatenate([np.arange(facts), asked])
    return np.stack([about[said], values[said]], axis=1).reshape(-1).astype(np.int32)
