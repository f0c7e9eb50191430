"""A server as it runs: from its first request to an end that loses none."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from kvjax.engine.engine import Engine
from kvjax.engine.service import Service
from kvjax.serve.app import make_app
from kvjax.serve.protocol import Patient
from kvjax.serve.settings import Settings
from kvjax.serve.state import Shared

_TICK = 0.05
_FLUSH = 5
"""Seconds that what was written may take to be read at the end."""
_KEEP_ALIVE = 30


class Server:
    """An engine behind HTTP.

    ``shared``: what its endpoints have in common, once it runs.
    """

    shared: Shared

    def __init__(self, engine: Engine, lm: Any, settings: Settings) -> None:
        self._engine, self._lm, self._settings = engine, lm, settings
        self._stop = asyncio.Event()

    async def run(
        self,
        listener: socket.socket,
        ready: Callable[[], None] = lambda: None,
        signals: Sequence[int] = (),
        again: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve at a socket that is bound, until ``stop``.

        Args:
          ready: called once requests can come.
          signals: that stop it; ``again`` is called at the second.

        Raises:
          RuntimeError: if the engine fails.
        """

        def signalled() -> None:
            again() if self._stop.is_set() else self.stop()

        loop = asyncio.get_running_loop()
        async with Service(self._engine) as service:
            self.shared = Shared(self._lm, service, self._settings)
            http = _Http(self._config(make_app(self.shared)), ready)
            for each in signals:
                loop.add_signal_handler(each, signalled)
            watching = asyncio.create_task(self._watch(http))
            try:
                await http.serve(sockets=[listener])
            finally:
                watching.cancel()
                await asyncio.wait([watching])
                for each in signals:
                    loop.remove_signal_handler(each)
            if service.error is not None:
                raise RuntimeError(f"the engine failed: {service.error!r}") from service.error

    def stop(self) -> None:
        """Come to an end, in the thread of the event loop: those who come now are refused, and
        those who were accepted are answered, as far as the grace time goes."""
        self._stop.set()

    def _config(self, app: Any) -> uvicorn.Config:
        settings = self._settings
        protocol: Any = functools.partial(Patient, patience=settings.patience)
        return uvicorn.Config(
            app, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_FLUSH,
        )  # fmt: skip

    async def _watch(self, http: uvicorn.Server) -> None:
        """Count tokens a second, and see to the end."""
        shared, service = self.shared, self.shared.service
        while not self._stop.is_set() and service.running:
            await asyncio.to_thread(shared.figures.sample)
            try:
                await asyncio.wait_for(self._stop.wait(), 1)
            except TimeoutError:
                continue
        shared.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.grace):
                while shared.active and service.running:
                    await asyncio.sleep(_TICK)
        shared.give_up()
        http.should_exit = True


class _Http(uvicorn.Server):
    """uvicorn's, which leaves signals to others."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """A socket at an address, where nobody is listened to yet; port 0 is a free one.

    Raises:
      OSError: if there is no such address, or it is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"{host} port {port}: {error.strerror}") from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Where a browser finds it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
