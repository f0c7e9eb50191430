"""The best texts of a beam search, and which rows of its cache they go on from."""

from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.generation.beams.history import History
from kvjax.generation.beams.searching import Beams
from kvjax.sampling.scores import TokenScore, token_scores


class Best(NamedTuple):
    """The best texts of each prompt, falling: ``tokens`` and ``scores``, [batch][n], those of a
    text that there is not empty and minus infinity; ``told``, their tokens' scores, empty where
    they were not asked for. ``known``, int[batch, n, steps], and ``before``, int[batch, n]: all
    tokens but the last one, -1 behind them, and how many these are."""

    tokens: list[list[list[int]]]
    scores: list[list[float]]
    told: list[list[list[TokenScore]]]
    known: np.ndarray
    before: np.ndarray


def best(history: History, ended: Any, kept: int, scores: int | None) -> Best:
    """The ``kept`` best of what has ended, of all groups; ``scores``: the likeliest tokens that are
    told with each, None for no log-probabilities."""
    order = np.argsort(-ended.score, axis=1, kind="stable")[:, :kept]
    rows = np.arange(len(order))[:, None]
    ended = jax.tree.map(lambda x: x[rows, order], ended)
    none = ended.score == -np.inf
    before = np.where(none, 0, ended.length - 1)
    known, beams = history.paths(before, ended.beam)
    tokens: Any = [[[] for _ in row] for row in order]
    told: Any = [[[] for _ in row] for row in order]
    for row, at in np.argwhere(~none).tolist():
        count = int(before[row, at])
        tokens[row][at] = [*known[row, at, :count].tolist(), int(ended.token[row, at])]
        if scores is not None:
            every = history.scores(row, beams[row, at, :count])
            every.append(jax.tree.map(lambda x, at=(row, at): x[at], ended.told))
            stacked = jax.tree.map(lambda *x: np.stack(x)[None], *every)
            told[row][at] = token_scores(stacked, 0, 0, count + 1, scores)
    return Best(tokens, ended.score.tolist(), told, known, before)


def live_texts(history: History, count: np.ndarray, beams: Beams) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all beams, int[batch, beams, steps], -1 behind the last, and how many they are;
    ``count``: of each group."""
    each = np.repeat(count, beams.width, axis=1)
    own = np.broadcast_to(np.arange(each.shape[1]), each.shape)
    return history.paths(each, own)[0], each


def ancestors(
    live: np.ndarray, count: np.ndarray, known: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each text, int[batch, n, steps], the beam that has most of it in its row of the cache,
    where all its tokens but the newest are; how many tokens they have in common, and how many more
    the row has, int[batch, n] each."""
    fed, steps = np.maximum(count - 1, 0), np.arange(live.shape[2])
    same = (live[:, None] == known[:, :, None]) & (steps < fed[:, None, :, None])
    same &= steps < before[:, :, None, None]
    shared = np.cumprod(same, axis=3).sum(axis=3)  # [batch, n, beams]
    beam = np.argmax(shared, axis=2)
    held = np.take_along_axis(shared, beam[:, :, None], axis=2)[..., 0]
    return beam, held, np.take_along_axis(fed, beam, axis=1) - held
