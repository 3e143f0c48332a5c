"""The listening socket, uvicorn's server over it, and the way out of it.

A server that ends answers the requests that are in, refuses new ones, and closes connections behind their answers. The
listening socket stays open meanwhile: a load balancer learns from 503 that it must send requests elsewhere, and clients
are told when to come again; from a refused connection both would learn only that something is broken.
"""

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
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.config import HttpConfig
from minisgl.server.api.http.connection import Connection
from minisgl.server.api.http.errors import ApiError, shutting_down
from minisgl.server.api.http.request_head import route_path
from minisgl.server.api.metrics import RequestMetrics

# Answered to the last, for whoever watches the drain or wants to end it sooner.
WATCHING_ROUTES = frozenset(
    {"/metrics", "/version", "/server_info", "/get_server_info", "/abort", "/abort_request"},
)


class Drain:
    """Requests that are in, and the error of those that may not come in."""

    def __init__(self) -> None:
        self.error: ApiError | None = None  # for requests that may not come in, or were not answered in time
        self.num_requests = 0  # requests that are in
        self._unanswered: set[asyncio.Task[None]] = set()  # tasks of requests whose answers have not begun
        self._begun = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def begin(self) -> None:
        """Let no other request in."""
        self.error = self.error or shutting_down(None)
        self._begun.set()

    def end(self, error: ApiError) -> None:
        """Answer every request whose answer has not begun with this error, whatever it waits for."""
        self.error = error
        self._begun.set()
        for task in self._unanswered:
            task.cancel()

    async def begun(self) -> None:
        """Wait for the begin."""
        await self._begun.wait()

    async def empty(self) -> None:
        """Wait until all requests that are in are answered."""
        await self._is_empty.wait()

    def enter(self, request: asyncio.Task[None]) -> None:
        """Count a request, by the task that answers it."""
        self.num_requests += 1
        self._is_empty.clear()
        self._unanswered.add(request)

    def answering(self, request: asyncio.Task[None]) -> None:
        """Leave the end of its answer, which has begun, to whoever writes it."""
        self._unanswered.discard(request)

    def leave(self, request: asyncio.Task[None]) -> None:
        """Forget a request."""
        self._unanswered.discard(request)
        self.num_requests -= 1
        if not self.num_requests:
            self._is_empty.set()


class DrainGate:
    """Lets requests in until the drain begins."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain = self._drain
        if drain.error is None:
            await self._answer(scope, receive, send)
        elif route_path(scope) in WATCHING_ROUTES:
            await self._app(scope, receive, closing(send))
        else:
            await drain.error.response(scope)(scope, receive, closing(send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        drain, started = self._drain, False
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None  # uvicorn answers every request in a task of its own

        async def send_answer(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                drain.answering(task)
            await send(message)

        drain.enter(task)
        try:
            await self._app(scope, receive, send_answer)
        except asyncio.CancelledError:
            if drain.error is None or started:
                raise
            task.uncancel()
            await drain.error.response(scope)(scope, receive, closing(send))
        finally:
            drain.leave(task)


def closing(send: Send) -> Send:
    """Return a `send` for an answer behind which the connection closes."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return send_closing


logger = logging.getLogger(__name__)

ACCEPTS_A_TURN = 64  # before requests get their turn
LAST_SECONDS = 0.1  # for the requests of the last connections to be read
RETRY_SECONDS = 0.1  # after an accept that failed
KEEP_ALIVE_SECONDS = 75  # longer than clients keep idle connections, so that they close first
LOG_SECONDS = 10.0  # between two lines about it
NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Acceptor:
    """Gives each connection of a listening socket a protocol of its own. Starts at once.

    When the process may open no more files, clients wait in the backlog until one is closed. The event loop's own
    server would take such connections and close them without a byte, or stop for a second, and tell nobody of either.
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
        """Accept who waits in the backlog, whom the kernel would cut off, then no more."""
        while self._accept():
            await asyncio.sleep(0)
        self._loop.remove_reader(self._listener)
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()
        await asyncio.sleep(LAST_SECONDS)

    def _accept(self) -> bool:
        """Accept some connections. False if there is no other, or none may be accepted now."""
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:  # it left while it waited
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
    """Runs uvicorn with our own connections. It leaves signals alone: the supervisor has its own word for the end."""

    def __init__(self, app: ASGIApp, http: HttpConfig, drain: Drain, metrics: RequestMetrics) -> None:
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
        self._connect = partial(Connection, config, self.server_state, {}, header_timeout=http.receive_timeout)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept on the one socket by means of our own."""
        await super().startup(sockets=[])
        assert sockets is not None
        (listener,) = sockets
        self._acceptor = Acceptor(listener, self.config.backlog, self._connect, self.config.ssl, self._metrics)
        self._accepts.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, close idle connections, and wait until the others have been answered."""
        await self._acceptor.close()
        await super().shutdown(sockets)

    def end(self, error: ApiError) -> None:
        """Tell every client that waits for the begin of an answer this error, and end."""
        self._drain.end(error)
        self.should_exit = True

    async def drain(self, drained: Callable[[], None]) -> None:
        """Wait for a drain to begin; say so when every request that came before is answered."""
        await self._drain.begun()
        await self._accepts.wait()  # a server that has only just started: clients may be waiting
        for connection in self.server_state.connections:
            cast(Connection, connection).close_after_answer()
        await self._drain.empty()
        drained()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
