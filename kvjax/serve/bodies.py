"""A request's body, as far as it may go."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from kvjax.serve.errors import Refused


async def read_body(request: Request, most: int, patience: float) -> bytes | None:
    """All of it; None if the client has gone.

    Raises:
      Refused: if it is larger than ``most`` bytes, or takes longer than ``patience`` seconds.
    """
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise Refused(408, f"the body took longer than {patience:g} s") from None
    except ClientDisconnect:
        return None
    return bytes(body)


def _too_large(most: int) -> Refused:
    return Refused(413, f"the body is larger than {most} bytes", code="request_too_large")
