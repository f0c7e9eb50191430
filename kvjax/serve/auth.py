"""Access control: API keys, requests from pages of other sites, and shutdown."""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvjax.serve.json_body import APIError
from kvjax.serve.state import ServerState

PUBLIC_PATHS = ("/", "/health")
"""Paths that need no API key."""
MONITORING_PATHS = (*PUBLIC_PATHS, "/metrics", "/stats")
"""Paths that the server still answers while it shuts down."""


class AccessMiddleware:
    """ASGI middleware that rejects unauthorized requests and counts the others."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        self._keys = ApiKeys(state.settings.api_keys, state.settings.share_prefixes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, state = Request(scope), self._state
        path = request.url.path
        try:
            if state.draining and path not in MONITORING_PATHS:
                headers = {"Connection": "close", "Retry-After": "1"}
                raise APIError(503, "the server is shutting down", headers=headers)
            tenant = None
            if path not in PUBLIC_PATHS:
                _check_origin(request, state.settings.allowed_origins)
                tenant = self._keys.tenant(request.headers.get("authorization"))
        except APIError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if path in MONITORING_PATHS:
            await self._app(scope, receive, send)
            return
        state.active_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            state.active_requests -= 1


class ApiKeys:
    """The API keys of a server. They are compared in constant time. Without keys, every request is
    authorized."""

    def __init__(self, keys: Sequence[str], share_prefixes: bool) -> None:
        self._secret, self._share_prefixes = secrets.token_bytes(32), share_prefixes
        self._digests = [self._digest(key.encode()) for key in keys]

    def tenant(self, authorization: str | None) -> str | None:
        """Return the tenant of a request, from its ``Authorization`` header; None if all clients
        share prefixes.

        A tenant is a keyed hash, so that the prefix tree never stores an API key.

        Raises:
          APIError: if the server has keys, and the header does not have one of them.
        """
        if not self._digests:
            return None
        scheme, _, key = (authorization or "").encode().partition(b" ")
        digest = self._digest(key.strip())
        # Compare with every key, so that the time does not depend on which one matches.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            message = "this server needs an API key: send Authorization: Bearer KEY"
            if authorization:
                message = "the server does not know this API key"
            headers = {"WWW-Authenticate": "Bearer"}
            raise APIError(401, message, code="invalid_api_key", headers=headers)
        return None if self._share_prefixes else digest.hex()

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine. Names other than ``localhost`` are not resolved."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    """Reject requests from web pages of other sites, unless their origin is allowed.

    A browser sends such requests even if it does not let the page read the response. On a loopback
    address, ``Host`` must be a loopback name too, because DNS rebinding can resolve any other name
    to this machine.

    Raises:
      APIError: if the origin is another site that is not allowed.
    """
    origin = request.headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return
    try:
        host = urlsplit(f"//{request.headers.get('host')}")
        same_site = urlsplit(origin).netloc == host.netloc
        if is_loopback((request.scope.get("server") or ("",))[0]):
            same_site &= is_loopback(host.hostname or "")
    except ValueError:
        same_site = False
    if not same_site:
        raise APIError(403, "pages of other sites may not use this server: see --allow-origin")
