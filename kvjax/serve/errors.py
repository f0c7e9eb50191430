"""What a server answers instead of a text: OpenAI's errors."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""Of statuses; all others are the request's own fault."""


class Refused(Exception):
    """A request that is not answered as it wishes.

    ``status``: of HTTP; ``param``: the field that it is about; ``code``: a word for programs;
    ``headers``: of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        found = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": found}

    def response(self) -> Response:
        """As an answer."""
        return json_response(self.body(), self.status, self.headers)


def to_json(value: Any) -> bytes:
    """JSON in UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Some clients end a line of an event at these too.
    for end in "\x85\u2028\u2029":
        text = text.replace(end, f"\\u{ord(end):04x}")
    # What clients sent, and an error repeats, may hold halves of characters.
    return text.encode("utf-8", "replace")


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer in JSON."""
    return Response(to_json(value), status, headers, "application/json")
