"""Pieces of several choices, as they come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvjax.engine.handle import Handle, Piece
from kvjax.engine.service import Service


async def pieces_of(
    service: Service, handles: Sequence[Handle]
) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """The number of a choice, and a piece of it; None where it has ended. Whoever does not read is
    waited for. Choices of which not all was read are cancelled in the end.

    Raises:
      NonFiniteError: as of ``Service.pieces``.
      StoppedError: likewise.
    """
    news: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(handles))

    async def read(at: int) -> None:
        try:
            async with aclosing(service.pieces(handles[at])) as pieces:
                async for piece in pieces:
                    await news.put((at, piece))
            await news.put((at, None))
        except Exception as error:
            await news.put((at, error))

    readers = [asyncio.create_task(read(at)) for at in range(len(handles))]
    try:
        left = len(handles)
        while left:
            at, piece = await news.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield at, piece
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        for handle in handles:  # a reader that never began has not
            service.forget(handle)
