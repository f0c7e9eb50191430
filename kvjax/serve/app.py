"""The endpoints of a server."""

import asyncio
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvjax.serve.auth import Gate
from kvjax.serve.chat import Chat
from kvjax.serve.completions import Completions
from kvjax.serve.endpoint import Endpoint
from kvjax.serve.errors import Refused, json_response
from kvjax.serve.state import Shared

_PAGE = Path(__file__).with_name("page.html")
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page asks nobody else for anything."""


def make_app(shared: Shared) -> ASGIApp:
    """An application of ASGI that serves an engine's model."""
    page, watch = _PAGE.read_bytes(), _Watch(shared)
    parts = shared.lm, shared.limits, shared.texts

    async def root(request: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache"}
        return Response(page, headers=headers, media_type="text/html")

    routes = [
        Route("/", root),
        Route("/health", watch.health),
        Route("/metrics", watch.metrics),
        Route("/stats", watch.stats),
        Route("/v1/models", watch.models),
        Route("/v1/models/{name:path}", watch.model),
        Route("/v1/completions", Endpoint(shared, Completions(*parts)), methods=["POST"]),
        Route("/v1/chat/completions", Endpoint(shared, Chat(*parts)), methods=["POST"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={Refused: _refused, HTTPException: _unknown, Exception: _failed},
    )
    gate = Gate(app, shared)
    if not (origins := shared.settings.origins):
        return gate
    return CORSMiddleware(
        gate, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",),
        expose_headers=("Retry-After",),
    )  # fmt: skip


class _Watch:
    """What is known of the server itself."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    async def health(self, request: Request) -> Response:
        if self._shared.draining or not self._shared.service.running:
            state = "stopping" if self._shared.draining else "failed"
            return json_response({"status": state}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._shared.figures.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Response:
        found = await asyncio.to_thread(self._shared.figures.stats)
        return json_response(found | {"model": self._shared.settings.name})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._shared.settings.name:
            raise Refused(404, "there is no such model here", code="model_not_found")
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        shared = self._shared
        templates = shared.lm.tokenizer is not None and bool(shared.lm.tokenizer.templates)
        return {
            "id": shared.settings.name, "object": "model", "created": shared.created,
            "owned_by": "kvjax", "max_model_len": shared.limits.longest, "chat": templates,
        }  # fmt: skip


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response()


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"there is no {request.url.path} here"}.get(error.status_code, error.detail)
    return Refused(error.status_code, message, headers=error.headers).response()


async def _failed(request: Request, error: Exception) -> Response:
    return Refused(500, "the server failed; its log says how").response()
