"""An engine in a thread of its own, for programs of asyncio."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Unpack
from weakref import WeakKeyDictionary

from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.request import RequestParams


class StoppedError(RuntimeError):
    """A service was stopped, or its engine failed, before a request had ended."""


class Service:
    """An engine that runs as long as there is something to do, and is asked from one event loop.

    ::

        async with kvjax.Service(engine) as service:
            handle = service.submit("The json module", max_new_tokens=32)
            async for piece in service.pieces(handle):
                print(piece.text, end="")

    Nobody else steps the engine in the meantime. A request whose reader goes away, or is cancelled,
    is cancelled too, and its pages are free.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        # Of requests that nobody has any more, nobody reads.
        self._news: WeakKeyDictionary[Handle, asyncio.Queue[Piece | None]] = WeakKeyDictionary()
        self._work, self._stopping = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="kvjax-engine", daemon=True)

    async def __aenter__(self) -> "Service":
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def running(self) -> bool:
        """Whether requests are done."""
        return self._thread.is_alive() and not self._stopping and self.error is None

    def submit(self, prompt: str | Sequence[int], **settings: Unpack[RequestParams]) -> Handle:
        """Ask for a text; see ``Engine.submit``. Who reads its ``pieces`` gets them all.

        Raises:
          ValueError: as of ``Engine.submit``.
          StoppedError: if the engine does not run.
        """
        if not self.running:
            raise StoppedError("the engine does not run") from self.error
        news: asyncio.Queue[Piece | None] = asyncio.Queue()

        def callback(handle: Handle) -> None:
            piece, done = handle.take(), handle.done
            self._loop.call_soon_threadsafe(_add, news, piece, done)

        handle = self.engine.submit(prompt, callback=callback, **settings)
        self._news[handle] = news
        self._work.set()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request as it is."""
        self.engine.cancel(handle)
        self._work.set()

    def forget(self, handle: Handle) -> None:
        """Let a request go that nobody reads: it is cancelled, if it has not ended."""
        self._news.pop(handle, None)
        if not handle.done:
            self.cancel(handle)

    async def pieces(self, handle: Handle) -> AsyncGenerator[Piece, None]:
        """A request's text as it comes, to one reader.

        Raises:
          NonFiniteError: if its logits are not finite numbers.
          StoppedError: if the engine has stopped.
          ValueError: if they have been read, or are another service's.
        """
        news = self._news.get(handle)
        if news is None:
            raise ValueError(f"nothing is left to read of {handle}: one reader gets all pieces")
        try:
            while (piece := await news.get()) is not None:
                yield piece
        finally:
            self.forget(handle)
        if handle.error is not None:
            raise handle.error
        if not handle.done:
            raise StoppedError("the engine stopped before the request had ended") from self.error

    async def finished(self, handle: Handle) -> Handle:
        """The request, when it has ended; errors as of ``pieces``."""
        async for _ in self.pieces(handle):
            pass
        return handle

    async def stop(self) -> None:
        """Let the step that runs come to its end, and no other begin; requests that have not ended
        never do."""
        self._stopping = True
        self._work.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._end_all()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._work.clear()
                if not self.engine.busy:
                    self._work.wait()
                elif self.engine.step():
                    self._work.set()
        except BaseException as error:
            self.error = error
            self._loop.call_soon_threadsafe(self._end_all)
            raise

    def _end_all(self) -> None:
        for news in list(self._news.values()):
            news.put_nowait(None)


def _add(news: "asyncio.Queue[Piece | None]", piece: Piece, done: bool) -> None:
    if piece.text or piece.tokens:
        news.put_nowait(piece)
    if done:
        news.put_nowait(None)
