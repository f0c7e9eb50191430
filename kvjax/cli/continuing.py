"""Texts that go on from a file: ``--load-cache`` and ``--save-cache``."""

from pathlib import Path
from typing import Any

from kvjax.core.errors import CheckpointError
from kvjax.core.transfer import fetch
from kvjax.core.validation import UNLIMITED
from kvjax.generation.capacity import capacity_bucket
from kvjax.operations.saving import load_cache, save_cache
from kvjax.policies.model_config import positions_needed


def taken_up(
    lm: Any, folder: Path, words: str, new: int, max_len: int | None
) -> tuple[Any, list[int], list[int]]:
    """The cache of a file, with room for a text that goes on with ``words`` and so many tokens; the
    tokens that it holds; and those to be fed.

    Raises:
      CheckpointError: if the file is not what ``--save-cache`` wrote for this model.
      ValueError: if ``max_len`` is less than the cache holds.
    """
    cache, texts = load_cache(folder, model=lm, max_len=max_len)
    if texts is None or len(texts) != 1:
        raise CheckpointError(
            f"{folder}: has {len(texts or ())} texts: --load-cache goes on from the one that "
            "--save-cache writes"
        )
    held = int(fetch(cache.length)[0])
    ids = texts[0][held:] + lm.tokenizer.encode(words, add_special_tokens=not texts[0])
    need, holds = positions_needed(held + len(ids), new), max(cache.max_len, cache.grows_to or 0)
    if max_len is None and need > holds < UNLIMITED:
        limit = cache.positions or UNLIMITED
        max_len = min(capacity_bucket(need), max(limit, holds))
    if lm.mesh is not None or max_len is not None:
        cache, _ = load_cache(folder, model=lm, max_len=max_len, mesh=lm.mesh)
    return cache, texts[0][:held], ids


def put_away(lm: Any, folder: Path, cache: Any, tokens: list[int]) -> None:
    """Write the cache of one text, and all its tokens."""
    if cache.batch != 1:
        raise ValueError(
            f"--save-cache is for one text, and this mesh has {cache.batch} rows: give one whose "
            "data is 1"
        )
    save_cache(folder, cache, model=lm, tokens=[tokens])
