"""Work for a client, as long as it is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, whose request was read to its end; cancel it if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone = not working.done()
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})
    if not gone:
        working.result()
    elif not working.cancelled():
        # Of no interest to anybody any more.
        working.exception()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
