"""Token masks: which tokens the guide of each row allows next."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np

from kvjax.core.validation import ArgumentError
from kvjax.generation.model import ModelConfig
from kvjax.sampling.filters import ALL_ALLOWED


class Guide(Protocol):
    """A constraint on one text, such as a grammar. It says which tokens may come next."""

    def allowed(self) -> np.ndarray:
        """Return the token mask, uint32[words]. It has a bit per token, 32 per word, lowest bit
        first. The bit is 1 if the token may follow the accepted ones."""
        ...

    def accept(self, token: int, /) -> None:
        """Advance the guide past a token."""
        ...


class CopyableGuide(Guide, Protocol):
    """A guide that can be copied, so that several rows can start with it."""

    def copy(self) -> "CopyableGuide":
        """Return an independent copy in the same state."""
        ...


GuideChoice = CopyableGuide | Sequence[CopyableGuide | None]
"""One guide for all prompts, or a list with a guide or None for each prompt."""


def mask_words(config: ModelConfig) -> int:
    """Return the number of words of a token mask."""
    return -(-config.vocab_size // 32)


def guide_mask(guide: Guide, words: int) -> np.ndarray:
    """Return the token mask of a guide, uint32[words], and check it.

    Raises:
      ValueError: if the guide does not return such an array, or allows no token.
    """
    bits = np.asarray(guide.allowed())
    if bits.shape != (words,) or bits.dtype != np.uint32:
        raise ArgumentError(
            f"a guide must return uint32[{words}], got {bits.dtype}{list(bits.shape)}",
            param="guide",
        )
    if not bits.any():
        raise ArgumentError(
            "a guide allows no token: at its end it must allow end-of-text tokens", param="guide"
        )
    return bits


def draft_masks(guide: Any, draft: Sequence[int], masks: np.ndarray, eos: Collection[int]) -> None:
    """Fill in the masks after each token of a draft, until a token is not allowed or ends the text.

    Args:
      guide: the guide before the draft. It is not changed.
      draft: n proposed tokens.
      masks: uint32[1 + n, words]. The first row, which is the mask before the draft, must be set.
      eos: tokens that end a text.
    """
    ahead = None
    for place, token in enumerate(draft):
        if token in eos or not masks[place, token // 32] >> np.uint32(token % 32) & 1:
            break
        ahead = guide.copy() if ahead is None else ahead
        ahead.accept(token)
        masks[place + 1] = guide_mask(ahead, masks.shape[1])


def parse_guides(
    config: ModelConfig,
    given: GuideChoice | None,
    prompts: int,
    samples: int,
    rows: int,
    eos: Sequence[int],
    min_new_tokens: int,
) -> tuple[CopyableGuide | None, ...] | None:
    """Return the guide of each row, which is a copy of its prompt's guide; None if no row has a
    guide.

    Args:
      config: the model's config.
      given: the argument ``guide`` of ``generate``.
      prompts: the number of prompts.
      samples: the number of rows per prompt.
      rows: the number of rows, including empty ones at the end.
      eos, min_new_tokens: as for ``check_guide``.

    Raises:
      ValueError: if a guide is invalid, or a list does not have one entry per prompt.
    """
    guides = list(given) if isinstance(given, Sequence) else [given] * prompts
    if len(guides) != prompts:
        raise ValueError(f"{len(guides)} guides for {prompts} prompts: give one, or one per prompt")
    for guide in guides:
        if guide is not None:
            check_guide(guide, eos, min_new_tokens, "copy")
    if all(guide is None for guide in guides):
        return None
    copies: list[CopyableGuide | None] = []
    for guide in guides:
        copies += [None if guide is None else guide.copy() for _ in range(samples)]
    for guide in copies:
        if guide is not None:
            guide_mask(guide, mask_words(config))
    return tuple(copies + [None] * (rows - len(copies)))


def check_guide(guide: Guide, eos: Collection[int], min_new_tokens: int, *methods: str) -> None:
    """Raise ``ValueError`` if a guide lacks a method of ``Guide`` or one of ``methods``, has an end
    token that is not in ``eos``, or is used together with ``min_new_tokens``."""
    missing = [name for name in ("allowed", "accept", *methods) if not hasattr(guide, name)]
    if missing:
        raise ArgumentError(
            f"a guide needs a method {missing[0]}(), but {guide!r:.60} has none", param="guide"
        )
    if min_new_tokens:
        raise ArgumentError(
            f"min_new_tokens is {min_new_tokens}, but a guide may allow end-of-text tokens only: "
            "leave out min_new_tokens",
            param="min_new_tokens",
        )
    ends = set(getattr(guide, "ends", ())) - set(eos)
    if ends:
        raise ArgumentError(
            f"a guide ends its text with token {min(ends)}, which must be in eos_token_ids",
            param="guide",
        )


class GuideMasks:
    """The guides of rows, and their masks.

    Args:
      guides: the guide of each row, or None.
      words: the number of words of a mask.
      eos: tokens that end a text.
    """

    def __init__(self, guides: Sequence[Guide | None], words: int, eos: Collection[int]) -> None:
        self._guides, self._eos = guides, eos
        self._counts = np.zeros(len(guides), np.int32)
        self._masks = np.full((len(guides), words), ALL_ALLOWED, np.uint32)

    def accept(self, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Advance the guides past the tokens of the last step (int32[rows, n]). ``counts`` is the
        number of new tokens of each row after the step."""
        for row, guide in enumerate(self._guides):
            for token in tokens[row, : counts[row] - self._counts[row]].tolist():
                self._counts[row] += 1
                if guide is not None:
                    guide.accept(token)

    def next_masks(self, ended: np.ndarray) -> np.ndarray:
        """Return the masks of the tokens that may come next, uint32[rows, words]. Rows that have
        ``ended`` (bool[rows]) allow all tokens."""
        for row, guide in enumerate(self._guides):
            if guide is not None:
                words = self._masks.shape[1]
                self._masks[row] = ALL_ALLOWED if ended[row] else guide_mask(guide, words)
        return self._masks.copy()  # the transfer to the device may read it later

    def draft_masks(self, tokens: np.ndarray, counts: np.ndarray, ended: np.ndarray) -> np.ndarray:
        """Return masks, uint32[rows, 1 + n, words], of the tokens that may come next and of those
        that may come after each token of a draft. The draft ``tokens`` (int32[rows, n]) has
        ``counts`` real tokens per row."""
        rows, places = tokens.shape
        masks = np.full((rows, places + 1, self._masks.shape[1]), ALL_ALLOWED, np.uint32)
        masks[:, 0] = self.next_masks(ended)
        for row, guide in enumerate(self._guides):
            if guide is None or ended[row]:
                continue
            draft_masks(guide, tokens[row, : counts[row]].tolist(), masks[row], self._eos)
        return masks
