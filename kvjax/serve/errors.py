"""API errors in OpenAI's format, and JSON responses."""

import json
from collections.abc import Mapping

from starlette.responses import Response

JsonObject = dict[str, object]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""OpenAI's error type for each HTTP status; every other status is an invalid request."""


class APIError(Exception):
    """A request that the server rejects or can't complete.

    ``status``: the HTTP status; ``param``: the field that caused the error; ``code``: a
    machine-readable error code; ``headers``: additional headers of the response.
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

    def body(self) -> JsonObject:
        """The error as OpenAI's JSON object."""
        error_type = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": str(self),
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """The error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def to_json(value: object) -> bytes:
    """Encode a value as JSON in UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Some clients also split the lines of a server-sent event at these characters.
    for separator in "\x85\u2028\u2029":
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    # An error message may quote a lone surrogate from the request.
    return text.encode("utf-8", "replace")


def json_response(
    value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An HTTP response with a JSON body."""
    return Response(to_json(value), status, headers, "application/json")
