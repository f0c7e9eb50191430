"""The embedded model's texts: read once in a process, as that takes longer than most tests."""

import functools
from typing import Any

from kvjax.models.tiny import corpus, data


@functools.cache
def parts() -> dict[str, dict[str, str]]:
    """The documents of each part, by their names."""
    return corpus.read_parts()


def tokens_of(part: str, lm: Any) -> list[int]:
    """Ids of all documents of a part, one behind the other."""
    return [int(x) for one in data.encode(lm.tokenizer.backend, parts()[part]) for x in one]
