"""An engine in its own thread, for asyncio programs."""

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
    """The service was stopped, or its engine failed, before a request ended."""


class Service:
    """Runs an engine in a thread, for requests from one event loop.

    Nothing else may call the engine's ``step`` while the service runs. A request whose reader stops
    early is cancelled.

    Args:
      engine: the engine to run.

    Example:
      ```python
      async def answer(engine: kvjax.Engine) -> None:
          async with kvjax.engine.Service(engine) as service:
              handle = service.submit("The json module", max_new_tokens=8)
              async for piece in service.pieces(handle):
                  print(piece.text, end="")
      ```
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        # The keys are weak, because a request to which nothing refers has no reader.
        self._queues: WeakKeyDictionary[Handle, asyncio.Queue[Piece | None]] = WeakKeyDictionary()
        self._wake, self._stopping = threading.Event(), False
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
        """Whether requests are served."""
        return self._thread.is_alive() and not self._stopping and self.error is None

    def submit(self, prompt: str | Sequence[int], **settings: Unpack[RequestParams]) -> Handle:
        """Add a request, like ``Engine.submit``. Read its output with ``pieces``.

        Raises:
          ValueError: for the same reasons as ``Engine.submit``.
          StoppedError: if the engine is not running.
        """
        if not self.running:
            raise StoppedError("the engine is not running") from self.error
        queue: asyncio.Queue[Piece | None] = asyncio.Queue()

        def callback(handle: Handle) -> None:
            piece, done = handle.take(), handle.done
            self._loop.call_soon_threadsafe(_put, queue, piece, done)

        handle = self.engine.submit(prompt, callback=callback, **settings)
        self._queues[handle] = queue
        self._wake.set()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request with the tokens that it has."""
        self.engine.cancel(handle)
        self._wake.set()

    def forget(self, handle: Handle) -> None:
        """Drop the output of a request that has no reader, and cancel it if it still runs."""
        self._queues.pop(handle, None)
        if not handle.done:
            self.cancel(handle)

    async def pieces(self, handle: Handle) -> AsyncGenerator[Piece, None]:
        """Yield a request's output piece by piece, for one reader.

        Raises:
          NonFiniteError: if the request's logits are not finite.
          StoppedError: if the engine stops before the request ends.
          ValueError: if the output was read before, or belongs to another service.
        """
        queue = self._queues.get(handle)
        if queue is None:
            raise ValueError(
                f"{handle} has no output to read: each request has one reader, in its own service"
            )
        try:
            while (piece := await queue.get()) is not None:
                yield piece
        finally:
            self.forget(handle)
        if handle.error is not None:
            raise handle.error
        if not handle.done:
            raise StoppedError("the engine stopped before the request had ended") from self.error

    async def finished(self, handle: Handle) -> Handle:
        """Wait until a request has ended. Raises the same errors as ``pieces``."""
        async for _ in self.pieces(handle):
            pass
        return handle

    async def stop(self) -> None:
        """Stop after the current step. In readers of unfinished requests, ``StoppedError`` is
        raised."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
        self._close_queues()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                if not self.engine.busy:
                    self._wake.wait()
                elif self.engine.step():
                    self._wake.set()
        except BaseException as error:
            self.error = error
            self._loop.call_soon_threadsafe(self._close_queues)
            raise

    def _close_queues(self) -> None:
        for queue in list(self._queues.values()):
            queue.put_nowait(None)


def _put(queue: "asyncio.Queue[Piece | None]", piece: Piece, done: bool) -> None:
    if piece.text or piece.tokens:
        queue.put_nowait(piece)
    if done:
        queue.put_nowait(None)
