"""Which beam each token was chosen for, step by step: texts are read from it backwards."""

from typing import Any

import jax
import numpy as np


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


def in_common(tokens: np.ndarray, there: np.ndarray) -> list[list[int]]:
    """What texts of each prompt begin with in common: ``tokens``, int[batch, n, steps], -1 behind
    the last; ``there``, bool[batch, n], those that count."""
    found = []
    for texts, real in zip(tokens, there, strict=True):
        texts = texts[real]
        same = np.all(texts == texts[:1], axis=0) & (texts[0] >= 0) if len(texts) else []
        end = len(same) if np.all(same) else int(np.argmin(same))
        found.append([] if not len(texts) else texts[0, :end].tolist())
    return found
