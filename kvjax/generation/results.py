"""What generation gives: the whole result, or pieces of it as they come."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvjax.cache.state import KVCache
from kvjax.generation.statistics import GenerationStats
from kvjax.sampling.scores import Scores, TokenScore


@dataclass(frozen=True)
class GenerationResult:
    """What ``generate`` gives.

    ``text``: the new text of each row, without special tokens and without the prompt; None where
    the model has no tokenizer.
    ``tokens``: the new tokens of each row, the end-of-text token included.
    ``stats``: what it cost, and why each row ended.
    ``cache``: the prompts and the tokens that were fed, to continue from; None without a cache, and
    with a ``prefix_cache``, which has them.
    A row with a stop string that is longer than its ring's slack may be left behind it:
    ``kvjax.check`` says so, and ``kvjax.select`` has the other rows.
    ``unfed``: tokens of each row that belong to it, but are not in the cache yet: the newest one,
    or none where a stop string took back later ones. A continuation's prompts begin with them.
    ``logprobs``: of each of ``tokens``, where they were asked for, else None.
    ``lengths``: None, but where ``padded`` arrays were asked for: then ``tokens`` is int32[rows,
    max_new_tokens], ``lengths`` int32[rows], how many of these are real, and ``logprobs`` are
    ``Scores`` of [rows, max_new_tokens], 0 behind the last one, all of them NumPy's.
    ``guides``: of each row the guide that went along it, or None, where any was given, else None;
    the ``error`` of one of ``Guides`` says why it could not go on to the end of its grammar. Of a
    beam search it has taken in all of the row's tokens.
    ``sequence_scores``: of a beam search, the sum of each row's log-probabilities, with what
    penalties made of them, over its length to the power of ``length_penalty``; of ``best_of``, the
    mean of its log-probabilities by the model's own distribution; else None.

    Of a beam search ``unfed`` may be more tokens than one: the cache has of each text what it has
    in common with a beam that went on to the end; it is None where a ring or a tail can't be taken
    back so far. A text that there is not, as filters left fewer, is empty, and its score minus
    infinity.

    A row that met a stop string has the text before it, and the longest run of tokens whose text
    does not reach into it. Where a stop string begins inside a token, ``text`` has the first
    characters of that token, and ``tokens`` and ``cache`` end before it.
    """

    # The annotations leave None out: who has a tokenizer and a cache need not assert it.
    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    cache: KVCache
    unfed: list[list[int]]
    logprobs: Any = None  # list[list[TokenScore]] | Scores | None
    lengths: Any = None
    guides: Any = None  # tuple[Guide | None, ...] | None
    sequence_scores: list[float] | None = None


def padded(
    result: GenerationResult, width: int, padding: int, most: int | None
) -> GenerationResult:
    """A result with arrays in place of lists; ``most``: likeliest tokens that were told with each,
    None for no log-probabilities."""
    shape = len(result.tokens), width
    tokens: Any = np.full(shape, padding, np.int32)
    for row, ids in enumerate(result.tokens):
        tokens[row, : len(ids)] = ids
    scores = None
    if most is not None:
        one, ids, likeliest = np.zeros((2, *shape)), *np.zeros((2, *shape, most))
        for row, told in enumerate(result.logprobs):
            for at, each in enumerate(told):
                one[:, row, at] = each.logprob, each.drawn
                if most:
                    ids[row, at], likeliest[row, at] = zip(*each.likeliest, strict=True)
        chosen, drawn, likeliest = (x.astype(np.float32) for x in (*one, likeliest))
        arrays: Any = chosen, drawn, ids.astype(np.int32), likeliest
        scores = Scores(*arrays)
    lengths = np.array([len(ids) for ids in result.tokens], np.int32)
    return replace(result, tokens=tokens, logprobs=scores, lengths=lengths)


@dataclass(frozen=True)
class Piece:
    """What one step of a ``stream`` adds: the new text (None without a tokenizer) and tokens of
    each row, empty where there are none, the figures so far, and the ``logprobs`` of these tokens,
    None where they were not asked for."""

    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    logprobs: list[list[TokenScore]] | None = None
