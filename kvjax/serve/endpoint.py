"""An endpoint that generates: it reads a request, runs it in the engine, and sends the response."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from kvjax.core.validation import ArgumentError, KvjaxError
from kvjax.engine.beams import BeamResult
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.service import Service, StoppedError
from kvjax.generation.generator import best_rows
from kvjax.sampling.scores import TokenScore
from kvjax.serve.json_body import APIError, JsonObject, json_response, to_json
from kvjax.serve.logprobs import Echo, ScoredToken, scored_tokens
from kvjax.serve.parse_request import EndpointSchema, ParsedRequest, parse_request
from kvjax.serve.state import ServerState

_FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""OpenAI's finish reason for each finish reason of the engine."""


class GenerationResponse:
    """The response to a request. ``handles`` has one handle for each sample."""

    def __init__(
        self,
        service: Service,
        schema: EndpointSchema,
        request: ParsedRequest,
        handles: Sequence[Handle],
        model: str,
    ) -> None:
        self._service, self._schema = service, schema
        self._request, self._handles = request, handles
        self._echoed: set[int] = set()
        self._header = {
            "id": schema.id_prefix + secrets.token_hex(12),
            "object": schema.response_type,
            "created": int(time.time()),
            "model": model,
        }

    async def json(self) -> JsonObject:
        """Return the whole response, after all choices have finished.

        Raises:
          APIError: if a choice failed.
        """
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                pass
        request, choices = self._request, []
        for index, (handle, sequence, finish_reason) in enumerate(self._returned()):
            text, scored = self._echo_text(handle)
            if request.max_tokens:
                text += sequence.text
                scored += self._scored(handle, sequence, sequence.logprobs)
            scored = scored if request.logprobs else None
            choices.append(self._schema.choice(index, text, scored, finish_reason))
        return {**self._header, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events. An error ends the stream."""
        try:
            for index in range(len(self._handles)):
                if (chunk := self._schema.first_chunk(index)) is not None:
                    yield self._event(chunk)
            async with aclosing(self._pieces()) as pieces:
                async for index, piece in pieces:
                    for chunk in self._chunks(index, piece):
                        yield self._event(chunk)
            if self._request.include_usage:
                yield self._event(None)
        except APIError as error:
            yield b"data: " + to_json(error.body()) + b"\n\n"
            return
        yield b"data: [DONE]\n\n"

    async def _pieces(self) -> AsyncGenerator[tuple[int, Piece | None], None]:
        try:
            async with aclosing(_merge_pieces(self._service, self._handles)) as pieces:
                async for each in pieces:
                    yield each
        except StoppedError:
            raise APIError(503, "the server has stopped") from None
        except KvjaxError as error:
            raise APIError(500, str(error)) from None

    def _returned(self) -> list[tuple[Handle, Handle | BeamResult, str]]:
        """Return the handle, the sequence with the text, and the finish reason of each choice."""
        request, handles = self._request, self._handles
        if request.beam_width > 1:
            for index in range(len(handles)):
                self._finish_reason(index)
            results = [(handle, result) for handle in handles for result in handle.beam_results]
            return [
                (handle, result, self._reason(result.finish_reason)) for handle, result in results
            ]
        indexes = list(range(len(handles)))
        if request.samples > request.n:
            logprobs = [handle.logprobs or [] for handle in handles]
            indexes = best_rows(logprobs, request.samples, request.n)[0].ravel().tolist()
        return [(handles[i], handles[i], self._finish_reason(i)) for i in indexes]

    def _chunks(self, index: int, piece: Piece | None) -> Iterator[JsonObject]:
        """Yield the chunks for a piece of a choice. ``piece`` is None at the end of the choice."""
        schema, request, handle = self._schema, self._request, self._handles[index]
        if request.echoes and index not in self._echoed:
            self._echoed.add(index)
            text, scored = self._echo_text(handle)
            yield schema.chunk(index, text, scored if request.logprobs else None, None)
        if piece is None:
            scored = [] if request.logprobs else None
            yield schema.chunk(index, "", scored, self._finish_reason(index))
        elif request.max_tokens:
            scored = self._scored(handle, piece, piece.scores)
            if piece.text or scored:
                yield schema.chunk(index, piece.text, scored if request.logprobs else None, None)

    def _echo(self, handle: Handle) -> Echo | None:
        if not self._request.echoes:
            return None
        return self._request.echoes[self._handles.index(handle) // self._request.samples]

    def _echo_text(self, handle: Handle) -> tuple[str, list[ScoredToken]]:
        """Return the prompt's text and its scored tokens, if the choices repeat the prompt;
        otherwise nothing."""
        echo = self._echo(handle)
        if echo is None:
            return "", []
        scores = handle.prompt_logprobs
        return echo.text, [] if scores is None else echo.scored(scores)

    def _scored(
        self,
        handle: Handle,
        sequence: Handle | BeamResult | Piece,
        scores: Sequence[TokenScore] | None,
    ) -> list[ScoredToken]:
        """Return new tokens with their scores.

        After an echoed prompt, the end token is included, because clients that score prompts remove
        one entry per new token.
        """
        if not self._request.logprobs:
            return []
        echo = self._echo(handle)
        if echo is None:
            return scored_tokens(sequence.tokens, scores, sequence.starts, handle.request.eos)
        offsets = [len(echo.text) + start for start in sequence.starts]
        return scored_tokens(sequence.tokens, scores, offsets, ())

    def _finish_reason(self, index: int) -> str:
        """Return OpenAI's finish reason of a sample.

        Raises:
          APIError: if the sample failed or was cancelled.
        """
        handle = self._handles[index]
        for guide in (handle.request.guide, *(result.guide for result in handle.beam_results)):
            problem = getattr(guide, "error", None)
            if problem is not None:
                raise APIError(500, f"the text could not follow the grammar: {problem}")
        if handle.finish_reason not in _FINISH_REASONS:
            message = "the server is shutting down, and this request took too long"
            raise APIError(503, message)
        return self._reason(handle.finish_reason)

    def _reason(self, reason: str) -> str:
        return _FINISH_REASONS[reason] if self._request.max_tokens else "length"

    def _event(self, choice: JsonObject | None) -> bytes:
        """Format a server-sent event with a chunk. If ``choice`` is None, it is the event with the
        usage."""
        choices = [] if choice is None else [choice]
        event = {**self._header, "object": self._schema.chunk_type, "choices": choices}
        if self._request.include_usage:
            event["usage"] = None if choice else self._usage()
        return b"data: " + to_json(event) + b"\n\n"

    def _usage(self) -> JsonObject:
        # Each prompt counts once, with the cached tokens of its first sample.
        first_samples = self._handles[:: self._request.samples]
        prompt = sum(len(handle.request.tokens) for handle in first_samples)
        cached = sum(handle.cached_tokens for handle in first_samples)
        sequences = [each for handle in self._handles for each in handle.beam_results or [handle]]
        new = sum(len(each.tokens) for each in sequences) if self._request.max_tokens else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def _merge_pieces(
    service: Service, handles: Sequence[Handle]
) -> AsyncGenerator[tuple[int, Piece | None], None]:
    """Yield the pieces of all handles in the order in which they arrive, each with the index of its
    handle.

    The last piece of a handle is None. The queue is bounded, so a slow client delays only its own
    request. Handles that are not read to their end are cancelled.

    Raises:
      NonFiniteError: for the same reason as ``Service.pieces``.
      StoppedError: for the same reason as ``Service.pieces``.
    """
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(len(handles))

    async def read(index: int) -> None:
        try:
            async with aclosing(service.pieces(handles[index])) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    readers = [asyncio.create_task(read(index)) for index in range(len(handles))]
    try:
        unfinished = len(handles)
        while unfinished:
            index, piece = await queue.get()
            if isinstance(piece, Exception):
                raise piece
            unfinished -= piece is None
            yield index, piece
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        for handle in handles:  # a cancelled reader may not have started
            service.forget(handle)


_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
"""The headers of a streamed response."""

_FIELD_NAMES = {
    "draft": "prompt_lookup",
    "guide": "response_format",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_beams": "beam_width",
}
"""Request fields whose engine settings have a different name."""


class GenerationEndpoint:
    """An ASGI application for ``/v1/completions`` or ``/v1/chat/completions``."""

    def __init__(self, state: ServerState, schema: EndpointSchema) -> None:
        self._state, self._schema = state, schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, settings = self._state, self._state.settings
        state.queue.check(1)
        body = await _read_body(Request(scope, receive), settings.max_body, settings.client_timeout)
        if body is None:
            return
        # Reserve the place only now, because a client that never sends its body must not take one.
        with state.queue.reserve() as reservation:
            # Parse in a thread, because tokenizing a long prompt takes time.
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
