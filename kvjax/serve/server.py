"""The HTTP server: sockets, client timeouts, and shutdown."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvjax.engine.engine import Engine
from kvjax.engine.service import Service
from kvjax.generation.loaded_model import LanguageModel
from kvjax.serve.app import make_app
from kvjax.serve.state import ServerSettings, ServerState

_POLL_SECONDS = 0.05
_FLUSH_SECONDS = 5
"""How long clients may take to read the rest of their responses at shutdown."""
_KEEP_ALIVE_SECONDS = 30


class Server:
    """A server that answers HTTP requests with an engine.

    ``state`` is the state that requests share. It is set when the server runs.
    """

    state: ServerState

    def __init__(self, engine: Engine, lm: LanguageModel, settings: ServerSettings) -> None:
        self._engine, self._lm, self._settings = engine, lm, settings
        self._stop = asyncio.Event()

    async def run(
        self,
        listener: socket.socket,
        ready: Callable[[], None] = lambda: None,
        signals: Sequence[int] = (),
        on_second_signal: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve on a bound socket until ``stop`` is called.

        Args:
          listener: the bound socket.
          ready: a function that is called when the server accepts requests.
          signals: signals that stop the server.
          on_second_signal: a function that is called if one of these signals arrives during
            shutdown.

        Raises:
          RuntimeError: if the engine fails.
        """

        def on_signal() -> None:
            on_second_signal() if self._stop.is_set() else self.stop()

        loop = asyncio.get_running_loop()
        async with Service(self._engine) as service:
            self.state = ServerState(self._lm, service, self._settings)
            http = _HttpServer(self._config(make_app(self.state)), ready)
            for number in signals:
                loop.add_signal_handler(number, on_signal)
            watcher = asyncio.create_task(self._watch(http))
            try:
                await http.serve(sockets=[listener])
            finally:
                watcher.cancel()
                await asyncio.wait([watcher])
                for number in signals:
                    loop.remove_signal_handler(number)
            if service.error is not None:
                raise RuntimeError(f"the engine failed: {service.error!r}") from service.error

    def stop(self) -> None:
        """Shut down. Call this in the thread of the event loop.

        New requests are rejected. Accepted requests may finish within ``shutdown_timeout`` seconds.
        """
        self._stop.set()

    def _config(self, app: ASGIApp) -> uvicorn.Config:
        protocol: Any = functools.partial(
            TimeoutProtocol, client_timeout=self._settings.client_timeout
        )
        return uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
        )

    async def _watch(self, http: uvicorn.Server) -> None:
        """Sample the metrics every second, then drain the requests and stop uvicorn."""
        state, service = self.state, self.state.service
        while not self._stop.is_set() and service.running:
            await asyncio.to_thread(state.metrics.sample)
            try:
                await asyncio.wait_for(self._stop.wait(), 1)
            except TimeoutError:
                continue
        state.draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.shutdown_timeout):
                while state.active_requests and service.running:
                    await asyncio.sleep(_POLL_SECONDS)
        state.cancel_all()
        http.should_exit = True


class _HttpServer(uvicorn.Server):
    """A uvicorn server that calls ``ready`` after startup, and does not handle signals itself."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class TimeoutProtocol(H11Protocol):
    """uvicorn's HTTP protocol with a timeout for slow clients.

    The connection is closed if the client takes longer than ``client_timeout`` seconds to send the
    headers of a request, to send the rest of a body that was already answered, or to read from
    its response.
    """

    def __init__(self, *args: Any, client_timeout: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._client_timeout = client_timeout
        self._idle_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._update_idle_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_idle_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_idle_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._client_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_timer = _cancel(self._write_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer, self._write_timer = _cancel(self._idle_timer), _cancel(self._write_timer)
        super().connection_lost(exc)

    def _update_idle_timer(self) -> None:
        """Run the idle timer while no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._idle_timer = _cancel(self._idle_timer)
        elif self._idle_timer is None and not self.transport.is_closing():
            self._idle_timer = self.loop.call_later(self._client_timeout, self.transport.abort)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def bind(host: str, port: int) -> socket.socket:
    """Create a socket that is bound to an address but not yet listening. Port 0 chooses a free
    port.

    Raises:
      OSError: if the address does not exist or is in use.
    """
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"{host} port {port}: {error.strerror}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
