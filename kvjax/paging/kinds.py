"""Layers that go by the same tables of pages."""

from dataclasses import dataclass
from typing import Any

from kvjax.layouts import Paged, Split


@dataclass(frozen=True)
class Paging:
    """What layers have in common that go by the same tables: their ``layout``, of tokens or, where
    ``split`` says how these are divided, of a body's blocks."""

    layout: Paged
    split: Split | None = None

    def units(self, tokens: Any) -> Any:
        """Units that stand in pages where the text has so many tokens."""
        return tokens if self.split is None else self.split.flushed(tokens)

    def new_units(self, tokens: int) -> int:
        """Units that a call of so many tokens puts into pages, at most."""
        return tokens if self.split is None else -(-tokens // self.split.block)
