"""Baselines: unigram and trigram models of the same tokens."""

from collections.abc import Sequence

import numpy as np

ORDER = 3


def unigram_losses(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], vocab_size: int
) -> np.ndarray:
    """Nats of each test token except a document's first, from add-one unigram frequencies."""
    counts = np.bincount(np.concatenate([d[1:] for d in train]), minlength=vocab_size) + 1.0
    return -np.log(counts / counts.sum())[np.concatenate([d[1:] for d in test])]


def trigram_losses(
    train: Sequence[np.ndarray], test: Sequence[np.ndarray], vocab_size: int
) -> np.ndarray:
    """Nats of each test token except a document's first, from a modified Kneser-Ney trigram model.

    The model is interpolated, with three discounts per order computed from the counts of counts.
    The lowest order is a uniform distribution (Chen and Goodman, An Empirical Study of Smoothing
    Techniques for Language Modeling, Harvard TR-10-98).

    Args:
      train, test: documents as int arrays. All start with the same token, which also pads the
        context before it.
      vocab_size: the number of tokens in the vocabulary.
    """
    grams = np.concatenate([_grams(document) for document in train])
    queries = np.concatenate([_grams(document) for document in test])
    probability = np.full(len(queries), 1.0 / vocab_size)
    for order in range(1, ORDER + 1):
        if order == ORDER:
            units, counts = np.unique(_pack(grams, vocab_size, ORDER), return_counts=True)
        else:
            # Lower orders count the distinct tokens that precede an n-gram, not its occurrences.
            longer = np.unique(_pack(grams, vocab_size, order + 1))
            units, counts = np.unique(longer % vocab_size**order, return_counts=True)
        probability = _interpolate(
            units, counts, _pack(queries, vocab_size, order), vocab_size, probability
        )
    return -np.log(probability)


def _interpolate(
    units: np.ndarray, counts: np.ndarray, queries: np.ndarray, vocab_size: int, lower: np.ndarray
) -> np.ndarray:
    """Probabilities of the ``queries`` n-grams, interpolated with those of the lower order."""
    n1, n2, n3, n4 = (max(1, int((counts == n).sum())) for n in (1, 2, 3, 4))
    share = n1 / (n1 + 2 * n2)
    discounts = np.array(
        [0.0, 1 - 2 * share * n2 / n1, 2 - 3 * share * n3 / n2, 3 - 4 * share * n4 / n3]
    ).clip(0.0, None)
    contexts, context = np.unique(units // vocab_size, return_inverse=True)
    total = np.bincount(context, weights=counts)
    taken = discounts[np.minimum(counts, 3)]
    freed = np.bincount(context, weights=taken) / total
    kept = (counts - taken) / total[context]

    known, at = _find(units, queries)
    seen, which = _find(contexts, queries // vocab_size)
    own = np.where(known, kept[at], 0.0)
    return np.where(seen, own + freed[which] * lower, lower)


def _find(values: np.ndarray, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.searchsorted(values, queries).clip(0, len(values) - 1)
    return values[at] == queries, at


def _grams(document: np.ndarray) -> np.ndarray:
    """[tokens - 1, 3]: each token after the first, with the two tokens before it."""
    past = np.concatenate([np.repeat(document[:1], ORDER - 2), document])
    return np.stack([past[i : len(past) - ORDER + 1 + i] for i in range(ORDER)], axis=1)


def _pack(grams: np.ndarray, vocab_size: int, order: int) -> np.ndarray:
    packed = np.zeros(len(grams), np.int64)
    for column in range(ORDER - order, ORDER):
        packed = packed * vocab_size + grams[:, column]
    return packed
