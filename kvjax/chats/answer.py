"""An answer as an iterator, which Ctrl-C stops only between steps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from kvjax.generation.results import GenerationResult, Piece
from kvjax.generation.streaming import Stream


@contextmanager
def deferred_interrupt(on_interrupt: Callable[[], None]) -> Iterator[None]:
    """Defer Ctrl-C until the work inside the context is complete. The first Ctrl-C calls
    ``on_interrupt`` immediately, and is raised after the work. A second one is raised immediately.

    Only the main thread receives signals. In other threads, and where the process ignores the
    signal, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received = []

    def defer(number: int, frame: object) -> None:
        received.append((number, frame))
        if len(received) > 1:
            handler(number, frame)  # type: ignore[arg-type]
        on_interrupt()

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        handler(*received[0])


OnEnd = Callable[["Answer", GenerationResult | None], GenerationResult | None]
"""A chat's function that is called when an answer ends. It receives the answer and its result, and
returns the result without the cache. The result is None after an error."""


class Answer(Iterator[Piece]):
    """An answer that is generated while you iterate over it. Its pieces are like the pieces of
    ``kvjax.stream``.

    ``text`` and ``tokens`` are the answer so far. If the answer is stopped early, by ``close`` or
    an interrupt, the chat keeps this part. Before any other operation, the chat closes an
    unfinished answer.
    """

    def __init__(self, stream: Stream, on_end: OnEnd, lock: AbstractContextManager[bool]) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self._stream, self._on_end, self._lock = stream, on_end, lock
        self._result: GenerationResult | None = None
        self._over = False

    def __next__(self) -> Piece:
        with self._lock:
            if self._over:
                raise StopIteration
            # An interrupt in the middle of a step would lose the cache.
            with deferred_interrupt(self._stream.stop):
                return self._next_piece()

    def close(self) -> None:
        """Stop the answer, if it has not ended. Tokens that are being computed are rewound, or kept
        if the cache can't rewind them."""
        if not self._over:
            self._stream.stop()  # shortens a piece that another thread is waiting for
            with self._lock, deferred_interrupt(lambda: None), suppress(StopIteration):
                while not self._over:
                    self._next_piece()

    @property
    def result(self) -> GenerationResult:
        """The result, as ``kvjax.generate`` returns it, but without the cache, which the chat
        keeps.

        ``stats.prompt_tokens`` counts the whole conversation, and ``stats.cached_tokens`` the part
        of it that was not prefilled again.

        Raises:
          RuntimeError: before the end, or if an error ended the answer.
        """
        if self._result is None:
            raise RuntimeError("the result is complete after the last piece: iterate to the end")
        return self._result

    def _next_piece(self) -> Piece:
        try:
            piece = next(self._stream)
        except BaseException as error:
            self._over = True
            complete = isinstance(error, StopIteration)
            self._result = self._on_end(self, self._stream.result if complete else None)
            raise
        self.text += piece.text[0]
        self.tokens += piece.tokens[0]
        return piece
