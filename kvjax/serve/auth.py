"""Who comes in: API keys, other sites' pages, and nobody once the server is to end."""

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvjax.serve.errors import Refused
from kvjax.serve.state import Shared

OPEN = ("/", "/health")
"""Paths that need no key."""
WATCHED = (*OPEN, "/metrics", "/stats")
"""Paths that are answered while the server comes to its end."""


class Gate:
    """A layer of ASGI around everything else; it counts the requests that it has let in."""

    def __init__(self, app: ASGIApp, shared: Shared) -> None:
        self._app, self._shared = app, shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        try:
            if self._shared.draining and request.url.path not in WATCHED:
                headers = {"Connection": "close", "Retry-After": "1"}
                raise Refused(503, "the server comes to its end", headers=headers)
            tenant = None
            if request.url.path not in OPEN:
                _check_origin(request, self._shared.settings.origins)
                given = request.headers.get("authorization")
                tenant = self._shared.keys.tenant(None if given is None else given.encode())
        except Refused as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if request.url.path in WATCHED:
            await self._app(scope, receive, send)
            return
        self._shared.active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._shared.active -= 1


def loopback(host: str) -> bool:
    """Whether it is this machine, and known to be without asking for its address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_origin(request: Request, origins: tuple[str, ...]) -> None:
    """Pages of other sites, which a browser lets send what it does not let them read, ask for
    nothing, but for ``origins``. Nor do those whose name has come to mean this machine.

    Raises:
      Refused: if it is one of these.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in origins or "*" in origins:
        return
    try:
        mine = urlsplit(f"//{request.headers.get('host')}")
        same = urlsplit(origin).netloc == mine.netloc
        here = loopback((request.scope.get("server") or ("",))[0])
        same &= not here or loopback(mine.hostname or "")
    except ValueError:
        same = False
    if not same:
        raise Refused(403, "pages of other sites may not use this server: --allow-origin")
