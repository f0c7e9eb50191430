"""Tables of pages that somebody else counts: an engine, on the host, for many requests at once."""

import jax.numpy as jnp

from kvjax.core.trees import state, static_field
from kvjax.core.typing import Array, RowMask


@state
class GivenPages:
    """Rows' tables alone, in the place of a ``PageAllocator``: a call finds the pages that it
    writes in there already, or takes none of its tokens.

    ``table``: int32[rows, columns], the page of each column, −1 for none; ``pages``: of the pool.
    Whoever fills it in must see to it that no page has two writers, and that none is given away
    which a query may see yet.
    """

    table: Array
    pages: int = static_field()

    @property
    def whole(self) -> Array:
        """The table."""
        return self.table

    def append(
        self, columns: Array, wanted: Array, gone: tuple[Array, Array] | None = None
    ) -> tuple["GivenPages", RowMask]:
        """As it is, and bool[rows], the rows that have a page in all columns, int32[rows, n], where
        one is wanted, bool[rows, n]."""
        found = jnp.take_along_axis(self.table, columns, axis=1, mode="fill", fill_value=-1)
        return self, jnp.all(~wanted | (found >= 0), axis=1)
