"""An endpoint that generates: reads a request, runs it in the engine, and sends the response."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvjax.core.validation import ArgumentError
from kvjax.engine.handle import Handle
from kvjax.engine.service import StoppedError
from kvjax.serve.errors import APIError, json_response
from kvjax.serve.parse_request import EndpointSchema, ParsedRequest, parse_request
from kvjax.serve.response import GenerationResponse
from kvjax.serve.state import ServerState

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The headers of a streamed response."""

_FIELD_NAMES = {
    "guide": "response_format",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_beams": "beam_width",
}
"""Request fields whose engine settings have another name."""


class GenerationEndpoint:
    """An ASGI application for ``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, state: ServerState, schema: EndpointSchema) -> None:
        self._state, self._schema = state, schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, settings = self._state, self._state.settings
        state.queue.check(1)
        body = await _read_body(Request(scope, receive), settings.max_body, settings.patience)
        if body is None:
            return
        # Reserved only now: a client that never sends its body must not take a place.
        with state.queue.reserve() as reservation:
            # In a thread, because tokenizing a long prompt takes time.
            request = await asyncio.to_thread(self._parse, body)
            reservation.grow(request.num_sequences)
            await _run_until_disconnect(receive, self._respond(request, scope, receive, send))

    def _parse(self, body: bytes) -> ParsedRequest:
        state = self._state
        return parse_request(
            body,
            self._schema,
            model=state.settings.name,
            max_sequences=state.limits.max_sequences,
            guides=state.guides,
        )

    async def _respond(
        self, request: ParsedRequest, scope: Scope, receive: Receive, send: Send
    ) -> None:
        state, handles = self._state, self._submit(request, scope["state"]["tenant"])
        name = state.settings.name
        response = GenerationResponse(state.service, self._schema, request, handles, name)
        try:
            if not request.stream:
                await json_response(await response.json())(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
            async with aclosing(response.events()) as events:
                async for event in events:
                    await _send_body(send, event, more=True)
            await _send_body(send, b"", more=False)
        finally:
            state.handles.difference_update(handles)
            for handle in handles:
                if not handle.done:
                    state.service.cancel(handle)
                state.metrics.record(handle)

    def _submit(self, request: ParsedRequest, tenant: str | None) -> list[Handle]:
        """Submit all samples to the engine, or none of them."""
        service, handles = self._state.service, []
        try:
            for prompt, settings in request.engine_requests(tenant):
                handles.append(service.submit(prompt, **settings))
        except (ValueError, StoppedError) as error:
            for handle in handles:
                service.cancel(handle)
            if isinstance(error, StoppedError):
                raise APIError(503, "the engine is not running") from None
            param = error.param if isinstance(error, ArgumentError) else None
            if param == "prompt":
                param = self._schema.prompt_field
            field = param and _FIELD_NAMES.get(param, param)
            raise APIError(400, str(error), param=field) from None
        self._state.handles.update(handles)
        return handles


async def _send_body(send: Send, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _read_body(request: Request, max_bytes: int, timeout: float) -> bytes | None:
    """Read the body of a request; None if the client disconnects.

    Raises:
      APIError: if the body is too large, or takes longer than ``timeout`` seconds.
    """
    too_large = APIError(
        413, f"the body is larger than {max_bytes} bytes", code="request_too_large"
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise APIError(408, f"the body took longer than {timeout:g} s") from None
    except ClientDisconnect:
        return None
    return bytes(body)


async def _run_until_disconnect(receive: Receive, work: Coroutine[object, None, None]) -> None:
    """Run ``work``, and cancel it if the client disconnects. The body must have been read."""
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected = not working.done()
        for task in (working, disconnect):
            task.cancel()
        await asyncio.wait({working, disconnect})
    if not disconnected:
        working.result()
    elif not working.cancelled():
        working.exception()  # marks the exception as retrieved; the client is gone


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
