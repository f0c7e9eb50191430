"""Requests whose row and pages were given to others, with all that they had on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.core.device import fetch


@dataclass
class Parked:
    """What a row had.

    ``filled``, ``count``: as of its ``Slot``; ``rows``, ``stands``: as ``programs.take`` gives
    them; ``columns``: of each kind of layers, those of its table; ``contents``: what stands in
    their pages, of each kind, a page after the other; ``nbytes``: of all that.
    """

    filled: int
    count: int
    rows: Any
    stands: Any
    columns: list[list[int]]
    contents: list[Callable[[], list[list[np.ndarray]]]]
    nbytes: int
    landed: bool = False

    def land(self) -> None:
        """Wait for it, once, so that the device need not hold it any longer."""
        if self.landed:
            return
        self.landed = True
        self.rows, self.stands = fetch((self.rows, self.stands))
        for number, contents in enumerate(self.contents):
            found = contents()
            self.contents[number] = lambda found=found: found


def begin_landing(arrays: Any) -> None:
    """Let arrays come to the host while the device goes on."""
    for x in jax.tree.leaves(arrays):
        x.copy_to_host_async()
