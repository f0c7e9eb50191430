"""Who asks: API keys, and whose prefixes they share."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence

from kvjax.serve.errors import Refused


class Keys:
    """API keys, compared in constant time; none, and everybody may ask."""

    def __init__(self, keys: Sequence[str], share: bool) -> None:
        self._secret, self._share = secrets.token_bytes(32), share
        self._known = [self._digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._known)

    def tenant(self, authorization: bytes | None) -> str | None:
        """Whose prefixes a request shares, by its header ``Authorization``: a keyed hash of its
        key, so that no key stands in the tree; None where all share theirs.

        Raises:
          Refused: if there are keys, and it has none of them.
        """
        if not self._known:
            return None
        kind, _, key = (authorization or b"").partition(b" ")
        given = self._digest(key.strip())
        # All are looked at, whichever it is.
        found = [hmac.compare_digest(given, known) for known in self._known]
        if kind.lower() != b"bearer" or not any(found):
            message = "this server needs an API key: Authorization: Bearer KEY"
            if authorization:
                message = "the API key is not one of this server's"
            headers = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, message, code="invalid_api_key", headers=headers)
        return None if self._share else given.hex()

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)
