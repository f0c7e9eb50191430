"""What generations that run as they are iterated over have in common."""

import threading
from abc import abstractmethod
from collections.abc import Generator, Iterator

from kvjax.core.checks import given_a_cache
from kvjax.core.context import outside
from kvjax.generation.results import GenerationResult, Piece
from kvjax.generation.session import Session


class Pieces(Iterator[Piece]):
    """Pieces of a session's text, and after the last one the ``result``; see ``stream``. Threads
    that take a piece, or close it, wait for each other."""

    def __init__(self, session: Session, given: bool) -> None:
        self._running, self._given = session, given
        self._result: GenerationResult | None = None
        self._pieces: Generator[Piece, None, None] = self._run()
        self._turn = threading.RLock()

    @abstractmethod
    def _pieces_of_all(self) -> Iterator[Piece]:
        """All of them; the last one behind ``_result``."""

    @outside
    def __next__(self) -> Piece:
        with self._turn:
            return next(self._pieces)

    def close(self) -> None:
        """End it here: nothing more comes, and what a ``prefix_cache`` lent goes back."""
        with self._turn:
            self._pieces.close()

    @property
    def result(self) -> GenerationResult:
        """The whole result.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            raise RuntimeError("the result is there after the last piece: iterate to the end")
        return self._result

    def _run(self) -> Generator[Piece, None, None]:
        try:
            with given_a_cache(self._given):
                yield from self._pieces_of_all()
        finally:
            self._running.end(None)  # where it did not come to its end
