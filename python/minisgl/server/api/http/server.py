"""uvicorn's server with two parts of our own: how connections are accepted, and how it ends."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from minisgl.config import HttpConfig
from minisgl.server.api.http.connection import Connection
from minisgl.server.api.http.drain import DrainState
from minisgl.server.api.http.errors import ApiError
from minisgl.server.api.metrics import RequestMetrics

logger = logging.getLogger(__name__)

ACCEPTS_A_TURN = 64  # connections accepted in one turn of the event loop
LAST_SECONDS = 0.1  # for the requests of the last connections to be read
RETRY_SECONDS = 0.1  # after an accept that failed
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first
LOG_SECONDS = 10.0  # between two log lines about failed accepts
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Accepts connections from a listening socket, from its creation on, and gives each a protocol object.

    When the process may open no more files, clients wait in the backlog until one is closed. The event loop's own
    server would accept such connections and close them without a byte, or stop for a second, and log neither.
    """

    def __init__(
        self,
        listener: socket.socket,
        backlog: int,
        protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        metrics: RequestMetrics,
    ) -> None:
        self._listener = listener
        self._protocol = protocol
        self._tls = tls
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._logged: float | None = None  # when a failure was last logged
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener, self._accept)

    async def close(self) -> None:
        """Accept the connections in the backlog, which the kernel would reset, then stop."""
        while self._accept():
            await asyncio.sleep(0)
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()
        await asyncio.sleep(LAST_SECONDS)

    def _accept(self) -> bool:
        """Accept some connections. Return False if no other waits, or none can be accepted now."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:  # the client left while it waited
                continue
            except OSError as error:
                if error.errno not in NO_RESOURCES:
                    raise
                self._pause(error)
                return False
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        return True

    async def _connect(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except OSError as error:  # also from TLS: the client left, or does not speak it
            logger.debug("a connection failed: %s", error)
            connection.close()

    def _pause(self, error: OSError) -> None:
        self._metrics.failed_accepts += 1
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)
        now = time.monotonic()
        if self._logged is None or now - self._logged > LOG_SECONDS:
            self._logged = now
            logger.warning(
                "a connection must wait: %s; %d accepts have failed. Raise the hard limit of open files (ulimit -Hn)",
                error.strerror,
                self._metrics.failed_accepts,
            )

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener, self._accept)


class Server(uvicorn.Server):
    """uvicorn's server with our own connections and without signal handlers: the supervisor says when it ends."""

    def __init__(self, app: ASGIApp, http: HttpConfig, drain: DrainState, metrics: RequestMetrics) -> None:
        config = uvicorn.Config(
            app,
            ssl_keyfile=http.ssl_keyfile,
            ssl_certfile=http.ssl_certfile,
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=None,  # the supervisor's grace is the limit
        )
        super().__init__(config)
        self._drain = drain
        self._metrics = metrics
        self._accepts = asyncio.Event()
        timeouts = {"header_timeout": http.receive_timeout, "send_timeout": http.send_timeout}
        self._connect = partial(Connection, config, self.server_state, {}, **timeouts)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of the one socket with an Acceptor instead of uvicorn's server."""
        await super().startup(sockets=[])
        assert sockets is not None
        (listener,) = sockets
        self._acceptor = Acceptor(listener, self.config.backlog, self._connect, self.config.ssl, self._metrics)
        self._accepts.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, close idle connections, and wait until the others have been answered."""
        await self._acceptor.close()
        await super().shutdown(sockets)

    def end(self, error: ApiError) -> None:
        """Answer every request whose answer has not begun with this error, and end."""
        self._drain.end(error)
        self.should_exit = True

    async def drain(self, drained: Callable[[], None]) -> None:
        """Wait for a drain to begin, and call `drained` when every request under way is answered."""
        await self._drain.begun.wait()
        await self._accepts.wait()  # if the drain begins right at the start: clients may wait in the backlog
        for connection in self.server_state.connections:
            cast(Connection, connection).close_after_answer()
        await self._drain.is_empty.wait()
        drained()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
