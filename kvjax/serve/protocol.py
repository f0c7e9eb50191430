"""HTTP for clients that may be slow, or say nothing at all."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class Patient(H11Protocol):
    """uvicorn's, but that a client has ``patience`` seconds to send a request's head, what is left
    of one that was answered already, and to read what was written: behind them it is cut off."""

    def __init__(self, *args: Any, patience: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._patience = patience
        self._silent: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stuck = _cancelled(self._stuck)

    def connection_lost(self, exc: Exception | None) -> None:
        self._silent, self._stuck = _cancelled(self._silent), _cancelled(self._stuck)
        super().connection_lost(exc)

    def _look(self) -> None:
        """Nothing is done for a client, or its request has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._silent = _cancelled(self._silent)
        elif self._silent is None and not self.transport.is_closing():
            self._silent = self.loop.call_later(self._patience, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
