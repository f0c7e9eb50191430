"""The settings of a server, its limits, and the state that its requests share."""

import math
import time
from dataclasses import dataclass, field

from kvjax.core.validation import ArgumentError, normalize_int_field
from kvjax.engine.handle import Handle
from kvjax.engine.service import Service
from kvjax.generation.guides.grammars import Guides
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.model_config import new_tokens_for, positions_needed
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.serve.json_body import APIError
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.metrics import Metrics

RETRY_AFTER = 1
"""The ``Retry-After`` header of a rejected request, in seconds."""


class Limits:
    """The limits on one request.

    ``max_len`` is the maximum number of positions for a prompt and its new tokens.
    ``max_sequences`` is the maximum number of samples or beams, over all prompts.
    """

    def __init__(self, pool_config: PoolConfig, max_sequences: int) -> None:
        self.max_len, self.max_sequences = _longest_sequence(pool_config), max_sequences

    def check_prompt_count(self, count: int) -> None:
        """Raise ``APIError`` if there are more than ``max_sequences`` prompts."""
        if count > self.max_sequences:
            message = f"prompt has {count} prompts; this server accepts {self.max_sequences}"
            raise APIError(400, message, param="prompt")

    def max_new_tokens(
        self, prompts: list[list[int]], requested: int | None, default: int | None, field: str
    ) -> int:
        """Return the maximum number of new tokens for each prompt. It is the requested number, or
        else ``default``, or else as many as fit. ``field`` is the name of the field with the
        prompts.

        Raises:
          APIError: if this number of tokens does not fit.
        """
        longest = max(map(len, prompts))
        available = new_tokens_for(self.max_len, longest)
        limit = min(available, default or available) if requested is None else requested
        if limit < 1 or limit > available:
            needed = positions_needed(longest, limit)
            new = f" and {limit} new tokens need {needed} positions" if limit > 0 else ""
            message = f"{longest} prompt tokens{new}; this server allows {self.max_len}"
            raise APIError(400, message, param=field, code="context_length_exceeded")
        return limit


def _longest_sequence(pool_config: PoolConfig) -> int:
    """Return the length of the longest sequence that fits in an engine's positions and pools, in
    tokens."""

    def fits(tokens: int) -> bool:
        return all(
            kind.max_pages(tokens) <= (kind.page_group.layout.pool or 0)
            for kind in pool_config.groups
        )

    low, high = 0, pool_config.max_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


class RequestQueue:
    """Counts the sequences that run or wait. There may be at most ``capacity``."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.in_use = capacity, 0

    def check(self, count: int) -> None:
        """Raise ``APIError`` if the queue has no place for ``count`` more sequences at present."""
        if self.in_use + count > self.capacity:
            raise APIError(
                429,
                f"the queue is full ({self.capacity} sequences): try again later",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER)},
            )

    def reserve(self) -> "Reservation":
        """Reserve a place for one sequence of a new request.

        Raises:
          APIError: if the queue is full.
        """
        return Reservation(self)


class Reservation:
    """The places of one request in the queue, until its context ends."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue, self._count = queue, 0
        self.grow(1)

    def __enter__(self) -> "Reservation":
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.in_use -= self._count
        self._count = 0

    def grow(self, count: int) -> None:
        """Reserve ``count`` places in total.

        Raises:
          APIError: if the queue does not have this number of places, or not enough of them are
            free.
        """
        capacity, more = self._queue.capacity, count - self._count
        if count > capacity:
            message = f"the request needs {count} sequences; this server accepts {capacity}"
            raise APIError(400, message)
        self._queue.check(more)
        self._queue.in_use += more
        self._count = count


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server.

    Attributes:
      name: the model's name in requests.
      api_keys: the keys that clients may send. If it is empty, no key is needed.
      share_prefixes: whether clients with different keys share cached prefixes.
      allowed_origins: other sites whose pages may send requests, such as ``https://example.org``.
      max_sequences: maximum number of sequences that run or wait at the same time.
      max_body: maximum size of a request's body in bytes.
      client_timeout: seconds that a client may take to send a request or to read from its response.
      shutdown_timeout: seconds to finish accepted requests at shutdown.

    Raises:
      ValueError: if a setting is out of range.
    """

    name: str
    api_keys: tuple[str, ...] = ()
    share_prefixes: bool = False
    allowed_origins: tuple[str, ...] = ()
    max_sequences: int = 72
    max_body: int = 4 << 20
    client_timeout: float = 30.0
    shutdown_timeout: float = 30.0

    def __post_init__(self) -> None:
        normalize_int_field(self, "max_sequences", 1)
        normalize_int_field(self, "max_body", 1)
        for name, value in {
            "client_timeout": self.client_timeout,
            "shutdown_timeout": self.shutdown_timeout,
        }.items():
            if not 0 < value < math.inf:
                raise ArgumentError(
                    f"{name} is {value!r}: give a positive number of seconds", param=name
                )
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key must be printable ASCII without spaces")


@dataclass
class ServerState:
    """The state that all requests of a server share.

    ``lm`` is the model, and ``service`` the service of its engine. ``created`` is the start time in
    seconds since 1970. ``draining`` says whether the server is shutting down. ``active_requests``
    is the number of requests in progress, and ``handles`` has the engine's handles for them. The
    other fields are computed from these.
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
        """Return the grammar compiler, which is created on first use.

        Two threads that call this at the same time may create two compilers. Either one works.

        Raises:
          ValueError: for the same reasons as ``Guides``.
        """
        if self._guides is None:
            self._guides = Guides(self.lm)
        return self._guides

    def cancel_all(self) -> None:
        """Cancel all requests in progress."""
        for handle in self.handles:
            self.service.cancel(handle)
