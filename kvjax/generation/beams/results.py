"""The sequences of a beam search, reconstructed on the host, and the cache rows that hold them."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.generation.beams.config import BeamConfig
from kvjax.sampling.scores import Scores, TokenScore, token_scores


class History:
    """The tokens, parent beams and scores of every step, NumPy arrays [batch, beams] each."""

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._steps: list[tuple[np.ndarray, np.ndarray, Scores | None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, columns: PyTree, steps: int) -> None:
        """Add the first ``steps`` steps of ``programs.Columns``, on the host."""
        for step in range(steps):
            self._steps.append(jax.tree.map(lambda x, at=step: self._by_beam(x[:, at]), columns))

    def _by_beam(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x) // self._beams, self._beams, *x.shape[1:])

    def paths(self, length: np.ndarray, beam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Trace sequences back from their last token.

        Args:
          length: int[batch, n], tokens of each.
          beam: int[batch, n], the beam of its last token.

        Returns:
          Tokens and beams, int[batch, n, steps], -1 after the end.
        """
        rows = np.arange(len(length))[:, None]
        tokens = np.full((*length.shape, len(self)), -1, np.int32)
        beams, at = np.full_like(tokens, -1), np.array(beam)
        for step in range(len(self) - 1, -1, -1):
            token, parent, _ = self._steps[step]
            inside = length > step
            tokens[..., step] = np.where(inside, token[rows, at], -1)
            beams[..., step] = np.where(inside, at, -1)
            at = np.where(inside, parent[rows, at], at)
        return tokens, beams

    def scores(self, row: int, beams: np.ndarray) -> list[Scores]:
        """The ``Scores`` of a prompt's tokens, given the beam of each step."""
        return [
            jax.tree.map(lambda x, at=beam: x[row, at], self._steps[step][2])
            for step, beam in enumerate(beams)
        ]


def common_prefixes(tokens: np.ndarray, real: np.ndarray) -> list[list[int]]:
    """The longest common prefix of each prompt's sequences.

    Args:
      tokens: int[batch, n, steps], -1 after the end.
      real: bool[batch, n], the sequences that count.
    """
    prefixes = []
    for sequences, counts in zip(tokens, real, strict=True):
        sequences = sequences[counts]
        if not len(sequences):
            prefixes.append([])
            continue
        same = np.all(sequences == sequences[:1], axis=0) & (sequences[0] >= 0)
        end = len(same) if np.all(same) else int(np.argmin(same))
        prefixes.append(sequences[0, :end].tolist())
    return prefixes


class BestSequences(NamedTuple):
    """The best sequences of each prompt, the best first.

    ``tokens``, ``scores``: [batch][n], an empty list and -inf where a search found fewer;
    ``token_scores``: of their tokens, empty if not requested; ``known``: int[batch, n, steps], all
    tokens but the last, -1 after them; ``before``: int[batch, n], their number.
    """

    tokens: list[list[list[int]]]
    scores: list[list[float]]
    token_scores: list[list[list[TokenScore]]]
    known: np.ndarray
    before: np.ndarray


def best_sequences(history: History, finished: Any, n: int, scores: int | None) -> BestSequences:
    """The ``n`` best finished sequences of all groups.

    Args:
      history: of the search.
      finished: ``Hypotheses`` on the host.
      n: sequences of each prompt.
      scores: likeliest tokens reported with each token, None for no log-probabilities.
    """
    order = np.argsort(-finished.score, axis=1, kind="stable")[:, :n]
    rows = np.arange(len(order))[:, None]
    finished = jax.tree.map(lambda x: x[rows, order], finished)
    missing = finished.score == -np.inf
    before = np.where(missing, 0, finished.length - 1)
    known, beams = history.paths(before, finished.beam)
    tokens: list[list[list[int]]] = [[[] for _ in row] for row in order]
    reported: list[list[list[TokenScore]]] = [[[] for _ in row] for row in order]
    for row, at in np.argwhere(~missing).tolist():
        count = int(before[row, at])
        tokens[row][at] = [*known[row, at, :count].tolist(), int(finished.token[row, at])]
        if scores is not None:
            steps = history.scores(row, beams[row, at, :count])
            steps.append(jax.tree.map(lambda x, at=(row, at): x[at], finished.token_scores))
            stacked = jax.tree.map(lambda *x: np.stack(x)[None], *steps)
            reported[row][at] = token_scores(stacked, 0, 0, count + 1, scores)
    return BestSequences(tokens, finished.score.tolist(), reported, known, before)


def live_sequences(
    history: History, count: np.ndarray, beams: BeamConfig
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of all beams, int[batch, beams, steps], -1 after the end, and their numbers;
    ``count``: int[batch, groups], tokens of each group's beams."""
    counts = np.repeat(count, beams.group_size, axis=1)
    own = np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
    return history.paths(counts, own)[0], counts


def source_beams(
    live: np.ndarray, count: np.ndarray, known: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each best sequence, the beam whose cache row holds most of it. A row holds all tokens of
    its beam but the newest.

    Args:
      live: int[batch, beams, steps], tokens of the beams.
      count: int[batch, beams], their numbers.
      known: int[batch, n, steps], tokens of the best sequences but the last.
      before: int[batch, n], their numbers.

    Returns:
      int[batch, n] each: the beam, the tokens that its row shares with the sequence, and the tokens
      that the row holds after them.
    """
    fed, steps = np.maximum(count - 1, 0), np.arange(live.shape[2])
    same = (live[:, None] == known[:, :, None]) & (steps < fed[:, None, :, None])
    same &= steps < before[:, :, None, None]
    shared = np.cumprod(same, axis=3).sum(axis=3)  # [batch, n, beams]
    beam = np.argmax(shared, axis=2)
    held = np.take_along_axis(shared, beam[:, :, None], axis=2)[..., 0]
    return beam, held, np.take_along_axis(fed, beam, axis=1) - held
