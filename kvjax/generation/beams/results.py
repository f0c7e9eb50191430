"""The best texts of a beam search."""

from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.generation.beams.config import BeamConfig
from kvjax.sampling.scores import TokenScore, token_scores


class History:
    """Tokens, beams that they were chosen for, and scores, of every step: [batch, beams] each, as
    NumPy's. A step's beams go on from those of the step before."""

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._steps: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, columns: Any, steps: int) -> None:
        """Take in the first ``steps`` of ``Columns``, on the host."""
        for step in range(steps):
            self._steps.append(jax.tree.map(lambda x, at=step: self._apart(x[:, at]), columns))

    def _apart(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x) // self._beams, self._beams, *x.shape[1:])

    def paths(self, length: np.ndarray, beam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of texts of ``length`` tokens whose last one is of ``beam``, int[batch, n] both: tokens
        and beams, int[batch, n, steps], -1 behind the last."""
        rows = np.arange(len(length))[:, None]
        tokens = np.full((*length.shape, len(self)), -1, np.int32)
        beams, at = np.full_like(tokens, -1), np.array(beam)
        for step in range(len(self) - 1, -1, -1):
            token, parent, _ = self._steps[step]
            here = length > step
            tokens[..., step] = np.where(here, token[rows, at], -1)
            beams[..., step] = np.where(here, at, -1)
            at = np.where(here, parent[rows, at], at)
        return tokens, beams

    def scores(self, row: int, beams: np.ndarray) -> list[Any]:
        """``Scores`` of single tokens of a prompt, of the beams of its first steps."""
        return [
            jax.tree.map(lambda x, at=beam: x[row, at], self._steps[step][2])
            for step, beam in enumerate(beams)
        ]


def common_prefixes(tokens: np.ndarray, there: np.ndarray) -> list[list[int]]:
    """What texts of each prompt begin with in common: ``tokens``, int[batch, n, steps], -1 behind
    the last; ``there``, bool[batch, n], those that count."""
    found = []
    for texts, real in zip(tokens, there, strict=True):
        texts = texts[real]
        same = np.all(texts == texts[:1], axis=0) & (texts[0] >= 0) if len(texts) else []
        end = len(same) if np.all(same) else int(np.argmin(same))
        found.append([] if not len(texts) else texts[0, :end].tolist())
    return found


class BestSequences(NamedTuple):
    """The best texts of each prompt, falling: ``tokens`` and ``scores``, [batch][n], those of a
    text that there is not empty and minus infinity; ``told``, their tokens' scores, empty where
    they were not asked for. ``known``, int[batch, n, steps], and ``before``, int[batch, n]: all
    tokens but the last one, -1 behind them, and how many these are."""

    tokens: list[list[list[int]]]
    scores: list[list[float]]
    token_scores: list[list[list[TokenScore]]]
    known: np.ndarray
    before: np.ndarray


def best_sequences(history: History, ended: Any, kept: int, scores: int | None) -> BestSequences:
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
            every.append(jax.tree.map(lambda x, at=(row, at): x[at], ended.token_scores))
            stacked = jax.tree.map(lambda *x: np.stack(x)[None], *every)
            told[row][at] = token_scores(stacked, 0, 0, count + 1, scores)
    return BestSequences(tokens, ended.score.tolist(), told, known, before)


def live_sequences(
    history: History, count: np.ndarray, beams: BeamConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all beams, int[batch, beams, steps], -1 behind the last, and how many they are;
    ``count``: of each group."""
    each = np.repeat(count, beams.group_size, axis=1)
    own = np.broadcast_to(np.arange(each.shape[1]), each.shape)
    return history.paths(each, own)[0], each


def source_beams(
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
