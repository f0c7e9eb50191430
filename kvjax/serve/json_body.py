"""JSON bodies: the fields of a request, responses, and errors in OpenAI's format."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

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
"""OpenAI's error type for each HTTP status. Every other status is an invalid request."""


class APIError(Exception):
    """A request that the server rejects or can't complete.

    ``status`` is the HTTP status, ``param`` the field that caused the error, ``code`` a
    machine-readable error code, and ``headers`` additional headers of the response.
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
        """Return the error as OpenAI's JSON object."""
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
        """Return the error as an HTTP response."""
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
    """Create an HTTP response with a JSON body."""
    return Response(to_json(value), status, headers, "application/json")


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body that must be a JSON object.

    Raises:
      APIError: if the body is anything else.
    """

    def reject_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(body, parse_constant=reject_constant)
    except (ValueError, RecursionError) as error:
        raise APIError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise APIError(400, f"the body must be a JSON object, got {_short(value)}")
    return value


class Fields:
    """A JSON object whose fields are read one by one.

    Reading a field removes it, and ``reject_unknown`` raises an error for any remaining field. A
    null counts as a missing field. ``prefix`` is prepended to field names in errors.
    """

    def __init__(self, values: dict[str, Any], prefix: str = "") -> None:
        self._values, self._prefix = dict(values), prefix

    def error(self, name: str, expected: str, value: object) -> APIError:
        """Create the error for a field with a wrong value."""
        name = self._prefix + name
        return APIError(400, f"{name} must be {expected}, got {_short(value)}", param=name)

    def raw(self, name: str) -> Any:
        """Read a field of any type."""
        return self._values.pop(name, None)

    def text(self, name: str) -> str | None:
        """Read a string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self.error(name, "a string", value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a boolean."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self.error(name, "true or false", value)

    def number(self, name: str) -> float | None:
        """Read a finite number."""
        value = self.raw(name)
        if value is None or is_number(value):
            return value
        raise self.error(name, "a number", value)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Read an integer from ``low`` to ``high``. A number such as 2.0 is accepted as 2."""
        value = self.raw(name)
        if value is None:
            return None
        expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        if not is_number(value) or value != int(value) or value < low:
            raise self.error(name, expected, value)
        if high is not None and value > high:
            raise self.error(name, expected, value)
        return int(value)

    def nested(self, name: str) -> "Fields | None":
        """Read a nested object."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, "an object", value)
        return Fields(value, f"{self._prefix}{name}.")

    def ignore(self, *names: str) -> None:
        """Drop fields that do not affect the result."""
        for name in names:
            self._values.pop(name, None)

    def unsupported(self, name: str, *neutral: object) -> None:
        """Reject an unsupported field, unless its value is one of ``neutral``, for which it has no
        effect."""
        value = self.raw(name)
        if value is not None and not any(value == x and type(value) is type(x) for x in neutral):
            name = self._prefix + name
            message = f"{name} is not supported by this server: leave it out"
            raise APIError(400, message, param=name, code="unsupported_parameter")

    def reject_unknown(self) -> None:
        """Raise ``APIError`` if any field was not read."""
        for name, value in self._values.items():
            if value is not None:
                name = self._prefix + name
                message = f"unknown field {name[:80]!r}"
                raise APIError(400, message, param=name[:80], code="unknown_parameter")


def is_number(value: Any) -> bool:
    """Return whether a JSON value is a finite number. Booleans are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: object) -> str:
    """Format a value for an error message, with at most 60 characters."""
    if isinstance(value, str | int | float | None):
        return f"{value!r:.60}"
    return "a list" if isinstance(value, list) else "an object"
