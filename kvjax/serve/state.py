"""A server's settings, and the state that its requests share."""

import math
import time
from dataclasses import dataclass, field

from kvjax.core.validation import normalize_int_field
from kvjax.engine.handle import Handle
from kvjax.engine.service import Service
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.serve.limits import Limits, RequestQueue
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.metrics import Metrics


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server.

    ``name``: the model's name in requests. ``api_keys``: the keys that clients may send; without
    any, no key is needed. ``share_prefixes``: whether clients with different keys share cached
    prefixes. ``allowed_origins``: other sites whose pages may send requests, such as
    ``https://example.org``. ``max_sequences``: sequences that run or wait at once. ``max_body``:
    size of a request, in bytes. ``patience``: seconds that a client may take to send a request or
    to read from its response. ``grace``: seconds to finish accepted requests at shutdown.

    Raises:
      ValueError: if a setting is out of range.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_sequences: int = 72
    max_body: int = 4 << 20
    patience: float = 30.0
    grace: float = 30.0

    def __post_init__(self) -> None:
        normalize_int_field(self, "max_sequences", 1)
        normalize_int_field(self, "max_body", 1)
        for name, value in {"patience": self.patience, "grace": self.grace}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} is {value!r}: give a positive number of seconds")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must be printable ASCII without spaces")


@dataclass
class ServerState:
    """What the requests of a server share.

    ``lm``: the model; ``service``: its engine's service. ``created``: start time, in seconds
    since 1970. ``draining``: whether the server is shutting down. ``active_requests``: requests
    in progress; ``handles``: the engine's handles for them. The remaining fields are derived.
    """

    lm: LanguageModel
    service: Service
    settings: ServerSettings
    metrics: Metrics = field(init=False)
    queue: RequestQueue = field(init=False)
    limits: Limits = field(init=False)
    token_texts: TokenTexts | None = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    active_requests: int = 0
    handles: set[Handle] = field(default_factory=set)

    def __post_init__(self) -> None:
        engine, max_sequences = self.service.engine, self.settings.max_sequences
        self.metrics = Metrics(engine)
        self.queue = RequestQueue(max_sequences)
        self.limits = Limits(engine.pool_config, max_sequences)
        tokenizer = self.lm.tokenizer
        self.token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._guides: Guides | None = None

    def guides(self) -> Guides:
        """The grammar compiler, created on first use.

        Two threads that call this at once may create two; either one works.

        Raises:
          ValueError: as ``Guides``.
        """
        if self._guides is None:
            self._guides = Guides(self.lm)
        return self._guides

    def cancel_all(self) -> None:
        """Cancel all requests in progress."""
        for handle in self.handles:
            self.service.cancel(handle)
