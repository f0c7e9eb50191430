"""The key-value retrieval task: facts, and questions about them, as token ids.

A sequence consists of (key, value) pairs. The first pairs are facts, with distinct keys. The others
are questions: they repeat a key, and its value can only be predicted from the fact. Keys and values
are drawn at random for each sequence, so they can't be memorized.
"""

import numpy as np

KEYS = 256
VALUES = 64
VOCABULARY = 1 + KEYS + VALUES
"""Token 0 is unused. It is followed by the keys, then the values."""


def quiz(rng: np.random.Generator, rows: int, facts: int, questions: int) -> np.ndarray:
    """Generate test sequences: facts, then questions about some of them, each at most once.

    Returns:
      int32[rows, 2 * (facts + questions)].

    Raises:
      ValueError: if there are more questions than facts, or more facts than keys.
    """
    if not 0 < questions <= facts <= KEYS:
        raise ValueError(
            f"{questions} questions about {facts} facts: expected at most {KEYS} facts, and at "
            "most one question per fact"
        )
    return np.stack([_text(rng, facts, rng.permutation(facts)[:questions]) for _ in range(rows)])


def lesson(rng: np.random.Generator, rows: int, length: int, keys: int = KEYS) -> np.ndarray:
    """Generate training sequences with varying numbers of facts, and repeated questions.

    Args:
      rng: the random number generator.
      rows: the number of sequences.
      length: the length of a sequence in tokens.
      keys: the facts use only the first ``keys`` keys.

    Returns:
      int32[rows, length].
    """
    texts = []
    for _ in range(rows):
        pairs = -(-length // 2)
        most = min(keys, pairs // 2)
        facts = int(np.exp(rng.uniform(np.log(most / 4), np.log(most + 1))))
        questions = rng.integers(facts, size=pairs - facts)
        texts.append(_text(rng, facts, questions, keys)[:length])
    return np.stack(texts)


def _text(
    rng: np.random.Generator, facts: int, questions: np.ndarray, keys: int = KEYS
) -> np.ndarray:
    about = 1 + rng.permutation(keys)[:facts]
    values = 1 + KEYS + rng.integers(VALUES, size=facts)
    pairs = np.concatenate([np.arange(facts), questions])
    return np.stack([about[pairs], values[pairs]], axis=1).reshape(-1).astype(np.int32)
