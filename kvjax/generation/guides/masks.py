"""Which tokens may come next in each row, as its guide says."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from kvjax.generation.model import ModelConfig
from kvjax.sampling.filters import ALL_ALLOWED


class Guide(Protocol):
    """Which tokens may come next: a grammar, a list of choices. It goes along one text."""

    def allowed(self) -> np.ndarray:
        """uint32[words]: a bit for each token, 32 in a word, the lowest first; 1 for what may
        come behind the tokens that were accepted."""
        ...

    def accept(self, token: int, /) -> None:
        """A token has come."""
        ...


class CopyableGuide(Guide, Protocol):
    """A guide that several rows can begin with: each goes along a copy, or a copy of that."""

    def copy(self) -> "CopyableGuide":
        """The same, of which nothing is known to this one."""
        ...


GuideChoice = CopyableGuide | Sequence[CopyableGuide | None]
"""One for every row, or one for each prompt, None where that is free."""


def mask_words(config: ModelConfig) -> int:
    """Words of a bit for each token."""
    return -(-config.vocab_size // 32)


def guide_mask(guide: Guide, words: int) -> np.ndarray:
    """uint32[words]: what a guide allows.

    Raises:
      ValueError: if it gives something else, or allows nothing.
    """
    bits = np.asarray(guide.allowed())
    if bits.shape != (words,) or bits.dtype != np.uint32:
        raise ValueError(
            f"a guide gave {bits.dtype}{list(bits.shape)}, and must give uint32[{words}]"
        )
    if not bits.any():
        raise ValueError("a guide allows no token at all: one that has ended allows those that end")
    return bits


def draft_masks(guide: Any, draft: Sequence[int], found: np.ndarray, eos: Collection[int]) -> None:
    """Of a guide, and a draft behind its text, what may come behind each token, as far as the
    one before may and is none that ends a text: ``found``, uint32[1 + n, words], is given with the
    first, and filled in."""
    ahead = None
    for place, token in enumerate(draft):
        if token in eos or not found[place, token // 32] >> np.uint32(token % 32) & 1:
            break
        ahead = guide.copy() if ahead is None else ahead
        ahead.accept(token)
        found[place + 1] = guide_mask(ahead, found.shape[1])


def parse_guides(
    config: ModelConfig,
    given: GuideChoice | None,
    prompts: int,
    samples: int,
    rows: int,
    eos: Sequence[int],
    least: int,
) -> tuple[CopyableGuide | None, ...] | None:
    """A guide for each of so many ``rows``, copies of those that are given, where any is: of each
    prompt for each of its ``samples``, and none for the rows behind them.

    Raises:
      ValueError: if they are none, another number than there are prompts, of another vocabulary,
        or could not end a text where they must.
    """
    each = list(given) if isinstance(given, Sequence) else [given] * prompts
    if len(each) != prompts:
        raise ValueError(f"{len(each)} guides for {prompts} prompts: give one, or one a prompt")
    for guide in each:
        if guide is not None:
            check_guide(guide, eos, least, "copy")
    if all(guide is None for guide in each):
        return None
    found: list[CopyableGuide | None] = []
    for guide in each:
        found += [None if guide is None else guide.copy() for _ in range(samples)]
    for guide in found:
        if guide is not None:
            guide_mask(guide, mask_words(config))
    return tuple(found + [None] * (rows - len(found)))


def check_guide(guide: Guide, eos: Collection[int], least: int, *more: str) -> None:
    """Raise ``ValueError`` for what is no guide, or lacks ``more`` that it is to have, or could not
    end a text where it must: with one of ``eos``, and not before ``least`` tokens."""
    missing = [name for name in ("allowed", "accept", *more) if not hasattr(guide, name)]
    if missing:
        raise ValueError(f"a guide has {missing[0]}(), and {guide!r:.60} has not")
    if least:
        raise ValueError(
            f"min_new_tokens is {least}, but a guide may leave none but tokens that end a text"
        )
    ends = set(getattr(guide, "ends", ())) - set(eos)
    if ends:
        raise ValueError(
            f"a guide ends its text with token {min(ends)}, which eos_token_ids must have"
        )


class GuideMasks:
    """The guides of rows, as they go along their texts. ``guides``: one a row, or None; ``eos``:
    tokens that end a text."""

    def __init__(self, guides: Sequence[Guide | None], words: int, eos: Collection[int]) -> None:
        self._guides, self._eos = guides, eos
        self._counts = np.zeros(len(guides), np.int32)
        self._bits: Any = np.full((len(guides), words), ALL_ALLOWED, np.uint32)

    def accept(self, tokens: Any, counts: Any) -> None:
        """What was chosen last of each row, int32[rows, n], which has come to so many tokens: taken
        in where it was not."""
        for row, guide in enumerate(self._guides):
            for token in tokens[row, : counts[row] - self._counts[row]].tolist():
                self._counts[row] += 1
                if guide is not None:
                    guide.accept(token)

    def next_masks(self, ended: np.ndarray) -> np.ndarray:
        """uint32[rows, words]: what may come next; of rows that have ``ended``, bool[rows],
        anything."""
        for row, guide in enumerate(self._guides):
            if guide is not None:
                self._bits[row] = (
                    ALL_ALLOWED if ended[row] else guide_mask(guide, self._bits.shape[1])
                )
        return self._bits.copy()  # what is sent may be read later

    def draft_masks(self, tokens: Any, counts: Any, ended: np.ndarray) -> np.ndarray:
        """uint32[rows, 1 + n, words]: what may come next, and behind each token of a draft,
        int32[rows, n], so many of them real, as far as the one before was allowed."""
        rows, places = tokens.shape
        found = np.full((rows, places + 1, self._bits.shape[1]), ALL_ALLOWED, np.uint32)
        found[:, 0] = self.next_masks(ended)
        for row, guide in enumerate(self._guides):
            if guide is None or ended[row]:
                continue
            draft_masks(guide, tokens[row, : counts[row]].tolist(), found[row], self._eos)
        return found
