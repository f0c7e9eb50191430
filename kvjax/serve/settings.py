"""How a server is set up."""

import math
from dataclasses import dataclass

from kvjax.core.validation import normalize_int_field


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server allows.

    ``name``: of the model, as clients call it; ``keys``: API keys, none to do without;
    ``share_prefixes``: whether those who have different ones may begin with what others have
    computed; ``origins``: of other sites whose pages may ask, ``https://example.org``; ``places``:
    choices that it has at once, running or waiting; ``max_body``: bytes of a request; ``patience``:
    seconds that a client may take for a request, or to read what was written; ``grace``: seconds
    after a signal to end, in which those that were accepted are answered.

    Raises:
      ValueError: naming what can't be.
    """

    name: str
    keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    origins: tuple[str, ...] = ()
    places: int = 72
    max_body: int = 4 << 20
    patience: float = 30.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        normalize_int_field(self, "places", 1)
        normalize_int_field(self, "max_body", 1)
        for name, value in {"patience": self.patience, "grace": self.grace}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: give seconds, more than 0")
        for key in self.keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must be letters, numbers and signs, without spaces")
