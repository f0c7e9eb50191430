"""An endpoint that generates: from a body to an answer."""

import asyncio
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvjax.engine.handle import Handle
from kvjax.engine.service import StoppedError
from kvjax.serve.bodies import read_body
from kvjax.serve.errors import Refused, json_response
from kvjax.serve.fields import Fields, read_object
from kvjax.serve.form import Form
from kvjax.serve.leaving import while_there
from kvjax.serve.parse_request import Asked, read_common
from kvjax.serve.response import Answer
from kvjax.serve.several import check_whole, read_several
from kvjax.serve.state import Shared

_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_NAMES = {"num_beams": "beam_width", "guide": "response_format"}
"""Of settings, where clients have others."""


class Endpoint:
    """An application of ASGI."""

    def __init__(self, shared: Shared, form: Form) -> None:
        self._shared, self._form = shared, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shared, settings = self._shared, self._shared.settings
        request = Request(scope, receive)
        shared.queue.check(1)
        body = await read_body(request, settings.max_body, settings.patience)
        if body is None:
            return
        # A place is for those alone who have said what they want.
        with shared.queue.place() as place:
            # Long prompts take their time.
            asked = await asyncio.to_thread(self._read, body)
            place.grow(asked.places)
            await while_there(receive, self._answer(asked, scope, receive, send))

    def _read(self, body: bytes) -> Asked:
        fields = Fields(read_object(body))
        if fields.text("model") not in (None, name := self._shared.settings.name):
            message = f"there is no such model here: this server has {name!r}"
            raise Refused(404, message, param="model", code="model_not_found")
        asked = self._form.read(fields)
        read_several(fields, asked, self._shared.limits.most)
        read_common(fields, self._shared.guides, asked)
        check_whole(asked)
        return asked

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        shared, handles = self._shared, self._submitted(asked, scope["state"]["tenant"])
        answer = Answer(shared.service, self._form, asked, handles, shared.settings.name)
        try:
            if not asked.stream:
                await json_response(await answer.whole())(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
            async with aclosing(answer.events()) as events:
                async for event in events:
                    await _body(send, event, more=True)
            await _body(send, b"", more=False)
        finally:
            shared.handles.difference_update(handles)
            for handle in handles:
                if not handle.done:
                    shared.service.cancel(handle)
                shared.figures.ended(handle)

    def _submitted(self, asked: Asked, tenant: str | None) -> list[Handle]:
        service, handles = self._shared.service, []
        try:
            for prompt, settings in asked.each(tenant):
                handles.append(service.submit(prompt, **settings))
        except (ValueError, StoppedError) as error:
            for handle in handles:
                service.cancel(handle)
            if isinstance(error, StoppedError):
                raise Refused(503, "the engine does not run") from None
            word = str(error).split()[0].rstrip(",:")
            param = _NAMES.get(word, word if word in asked.settings else None)
            raise Refused(400, str(error), param=param) from None
        self._shared.handles.update(handles)
        return handles


async def _body(send: Any, body: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
