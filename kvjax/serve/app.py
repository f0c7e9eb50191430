"""The ASGI application: routes, monitoring endpoints and error handlers."""

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

from kvjax.serve.auth import AccessMiddleware
from kvjax.serve.chat import ChatSchema
from kvjax.serve.completions import CompletionsSchema
from kvjax.serve.endpoint import GenerationEndpoint
from kvjax.serve.json_body import APIError, json_response
from kvjax.serve.state import ServerState

_PAGE = Path(__file__).with_name("page.html")
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The policy for the page: it may not load anything from other servers."""


def make_app(state: ServerState) -> ASGIApp:
    """Create the ASGI application that serves the model of ``state``."""
    page, monitoring = _PAGE.read_bytes(), _Monitoring(state)
    parts = state.lm, state.limits, state.token_texts
    completions = GenerationEndpoint(state, CompletionsSchema(*parts))
    chat = GenerationEndpoint(state, ChatSchema(*parts))

    async def root(request: Request) -> Response:
        headers = {
            "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
            "Cache-Control": "no-cache",
        }
        return Response(page, headers=headers, media_type="text/html")

    app = Starlette(
        routes=[
            Route("/", root),
            Route("/health", monitoring.health),
            Route("/metrics", monitoring.metrics),
            Route("/stats", monitoring.stats),
            Route("/v1/models", monitoring.models),
            Route("/v1/models/{name:path}", monitoring.model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        exception_handlers={
            APIError: _api_error,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
    )
    protected = AccessMiddleware(app, state)
    origins = state.settings.allowed_origins
    if not origins:
        return protected
    return CORSMiddleware(
        protected,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("Retry-After",),
    )


class _Monitoring:
    """The endpoints that describe the server itself."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:
        if self._state.draining or not self._state.service.running:
            status = "stopping" if self._state.draining else "failed"
            return json_response({"status": status}, 503)
        return json_response({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._state.metrics.exposition)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Response:
        stats = await asyncio.to_thread(self._state.metrics.stats)
        return json_response(stats | {"model": self._state.settings.name})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self._state.settings.name:
            raise APIError(404, "no such model on this server", code="model_not_found")
        return json_response(self._model())

    def _model(self) -> dict[str, object]:
        state, tokenizer = self._state, self._state.lm.tokenizer
        return {
            "id": state.settings.name,
            "object": "model",
            "created": state.created,
            "owned_by": "kvjax",
            "max_model_len": state.limits.max_len,
            "chat": tokenizer is not None and bool(tokenizer.templates),
        }


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Respond to an error that Starlette raises, such as an unknown path."""
    assert isinstance(error, HTTPException)
    message = f"no such path: {request.url.path}" if error.status_code == 404 else error.detail
    return APIError(error.status_code, message, headers=error.headers).response()


async def _internal_error(request: Request, error: Exception) -> Response:
    return APIError(500, "internal server error; see the server's log").response()
