"""Facts, and questions about them: key-value retrieval in token ids.

A text is a row of pairs, a key and its value. The first pairs state facts, each key once; the
others ask: a key comes again, and its value can be told only by who still has the fact. Keys and
values are drawn anew for every text, so that nothing can be known by heart.
"""

import numpy as np

KEYS = 512
VALUES = 512
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


def lesson(rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Texts to learn from: a few facts or many, each asked for again and again.

    Returns:
      int32[rows, length].
    """
    texts = []
    for _ in range(rows):
        pairs = -(-length // 2)
        facts = int(np.exp(rng.uniform(np.log(8), np.log(min(KEYS, pairs // 2) + 1))))
        texts.append(_text(rng, facts, rng.integers(facts, size=pairs - facts))[:length])
    return np.stack(texts)


def _text(rng: np.random.Generator, facts: int, asked: np.ndarray) -> np.ndarray:
    keys = 1 + rng.permutation(KEYS)[:facts]
    values = 1 + KEYS + rng.integers(VALUES, size=facts)
    said = np.concatenate([np.arange(facts), asked])
    return np.stack([keys[said], values[said]], axis=1).reshape(-1).astype(np.int32)
