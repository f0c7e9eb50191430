"""What a tree has of the prompts of a request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvjax.prefixes.nodes import Key, Node
from kvjax.prefixes.texts import Texts
from kvjax.prefixes.tiers import Away


@dataclass
class Row:
    """A prompt: the nodes of what was found, which can be gone on from, its tokens, those that
    other texts begin with too, and where its state is to be taken."""

    tokens: list[int]
    path: list[Node]
    hit: int
    known: int
    stops: set[int] = field(default_factory=set)


def found_of(
    texts: Texts, key: Key, prompts: Sequence[list[int]]
) -> tuple[list[Row], list[Away], list[Any]]:
    """What there is of each prompt: the pages of it that are not on the device, and the states that
    rows go on from, None where there is nothing.

    Raises:
      GoneError: if a file is not there any more.
    """
    rows = [_row(texts, key, tokens) for tokens in prompts]
    if texts.terms.exact_prefix:
        _begin_together(texts, rows)
    away: dict[int, Away] = {}
    for number, kind in enumerate(texts.terms.kinds):
        for row in rows:
            for page in kind.needed(row.hit)[0]:
                kept = texts.page(row.path, number, page)
                if kept.number < 0 and id(kept) not in away:
                    away[id(kept)] = Away(number, kept, texts.contents(row.path, number, page))
    return rows, list(away.values()), [texts.state(row.path) for row in rows]


def _row(texts: Texts, key: Key, tokens: list[int]) -> Row:
    """What there is of a prompt; a token at least is left, whose logits are asked for."""
    unit = texts.terms.unit
    path = texts.nodes.walk(key, tokens[: len(tokens) - 1])
    texts.nodes.touch(path)
    hit = next((n for n in range(len(path), 0, -1) if texts.can_go_on(path, n)), 0)
    return Row(tokens, path[:hit], hit * unit, len(path) * unit)


def _begin_together(texts: Texts, rows: Sequence[Row]) -> None:
    """Let all rows begin at the same position: then their calls are those of the request without a
    tree, as far as they are made."""
    unit = texts.terms.unit
    common = min(row.hit for row in rows) // unit
    while common and not all(texts.can_go_on(row.path, common) for row in rows):
        common -= 1
    for row in rows:
        row.path, row.hit = row.path[:common], common * unit
