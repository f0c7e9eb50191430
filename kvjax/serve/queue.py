"""How many choices a server takes on at once."""

from kvjax.serve.errors import Refused

RETRY_AFTER = 1
"""Seconds that are proposed to those who find no place."""


class Queue:
    """Places for choices that run or wait."""

    def __init__(self, places: int) -> None:
        self.places, self.taken = places, 0

    def place(self) -> "Place":
        """One, at first, for a request that comes.

        Raises:
          Refused: if all are taken.
        """
        return Place(self)

    def check(self, more: int) -> None:
        """Raise ``Refused`` if there are not so many more."""
        if self.taken + more > self.places:
            raise Refused(
                429, f"all {self.places} places are taken: try again later", code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER)},
            )  # fmt: skip


class Place:
    """A request's places, which it gives back in the end."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._mine = queue, 0
        self.grow(1)

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.taken -= self._mine
        self._mine = 0

    def grow(self, to: int) -> None:
        """Have so many.

        Raises:
          Refused: if there are not so many at all, or not now.
        """
        places, more = self._queue.places, to - self._mine
        if to > places:
            raise Refused(400, f"a request of {to} choices: this server takes {places} at once")
        self._queue.check(more)
        self._queue.taken += more
        self._mine = to
