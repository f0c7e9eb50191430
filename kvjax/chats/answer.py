"""An answer as it comes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from kvjax.generation.results import GenerationResult, Piece
from kvjax.generation.streaming import Stream


@contextmanager
def held_back(heard: Callable[[], None]) -> Iterator[None]:
    """Let no interrupt out of the work inside, which would be lost half done: the first one calls
    ``heard``, and is raised behind the work; a second one is raised at once.

    Only the main thread hears of signals; elsewhere, and where a process ignores them, nothing is
    changed.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came = []

    def note(number: int, frame: object) -> None:
        came.append((number, frame))
        if len(came) > 1:
            usual(number, frame)  # type: ignore[arg-type]
        heard()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(*came[0])


Ended = Callable[["Answer", GenerationResult | None], GenerationResult | None]
"""What a chat does with an answer that has ended: it takes the cache out of the result, which is
None where an error ended it."""


class Answer(Iterator[Piece]):
    """An answer that runs as it is iterated over: pieces as of ``kvjax.stream``.

    ``text``, ``tokens``: what has come so far. One that is ended half way, by ``close`` or an
    interrupt, stays in the chat as far as it came, and so does one that is let go of: the chat
    closes it when it is asked for something else. ``lock``: the chat's, where threads share it.
    """

    def __init__(self, stream: Stream, ended: Ended, lock: AbstractContextManager[Any]) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self._stream, self._ended, self._lock = stream, ended, lock
        self._result: GenerationResult | None = None
        self._over = False

    def __next__(self) -> Piece:
        with self._lock:
            if self._over:
                raise StopIteration
            # What an interrupt would break off in the middle of could not be gone on from.
            with held_back(self._stream.stop):
                return self._take()

    def close(self) -> None:
        """End it here; what is under way is taken back, or, where the cache can't forget so much,
        taken in. One that has ended stays as it is."""
        if not self._over:
            self._stream.stop()  # another thread's piece is short then
            with self._lock, held_back(lambda: None), suppress(StopIteration):
                while not self._over:
                    self._take()

    @property
    def result(self) -> GenerationResult:
        """The whole result, as of ``kvjax.generate``, but without the cache, which the chat has;
        ``stats.prompt_tokens`` are those of the whole conversation, and ``cached_tokens`` the ones
        of them that were not read again.

        Raises:
          RuntimeError: before its end, or where an error ended it.
        """
        if self._result is None:
            raise RuntimeError("the result is there after the last piece: iterate to the end")
        return self._result

    def _take(self) -> Piece:
        try:
            piece = next(self._stream)
        except BaseException as error:
            self._over = True
            whole = isinstance(error, StopIteration)
            self._result = self._ended(self, self._stream.result if whole else None)
            raise
        self.text += piece.text[0]
        self.tokens += piece.tokens[0]
        return piece
