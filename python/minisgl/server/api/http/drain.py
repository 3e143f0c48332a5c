"""The drain of a server that ends: requests under way are answered, new ones are refused.

The listening socket stays open meanwhile: a load balancer learns from 503 that it must send requests elsewhere, and
clients are told when to come again; from a refused connection both would learn only that something is broken.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.api.http.errors import ApiError, shutting_down
from minisgl.server.api.http.middleware import at_start
from minisgl.server.api.http.request_head import route_path

# Served during a drain, for operators who watch it or want to end it sooner.
WATCHING_ROUTES = frozenset(
    {"/metrics", "/version", "/server_info", "/get_server_info", "/abort", "/abort_request"},
)


class DrainState:
    """Count of requests under way, and the error for requests that are refused."""

    def __init__(self) -> None:
        self.error: ApiError | None = None  # for refused requests and for those not answered in time; None: no drain
        self.num_requests = 0  # requests under way
        self.unanswered: set[asyncio.Task[None]] = set()  # tasks of requests whose answers have not begun
        self.begun = asyncio.Event()
        self.is_empty = asyncio.Event()  # all requests under way are answered
        self.is_empty.set()

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.error = self.error or shutting_down(None)
        self.begun.set()

    def end(self, error: ApiError) -> None:
        """Answer every request whose answer has not begun with this error."""
        self.error = error
        self.begun.set()
        for task in self.unanswered:
            task.cancel()

    def enter(self, request: asyncio.Task[None]) -> None:
        """Add a request, identified by the task that answers it."""
        self.num_requests += 1
        self.is_empty.clear()
        self.unanswered.add(request)

    def leave(self, request: asyncio.Task[None]) -> None:
        """Remove a request that is answered."""
        self.unanswered.discard(request)
        self.num_requests -= 1
        if not self.num_requests:
            self.is_empty.set()


class DrainGate:
    """Middleware that refuses requests once the drain has begun, those to WATCHING_ROUTES excepted."""

    def __init__(self, app: ASGIApp, drain: DrainState) -> None:
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
        drain = self._drain
        task: asyncio.Task[None] | None = asyncio.current_task()
        assert task is not None  # uvicorn answers every request in a task of its own

        drain.enter(task)
        try:
            await self._app(scope, receive, at_start(send, lambda _start: drain.unanswered.discard(task)))
        except asyncio.CancelledError:
            if drain.error is None or task not in drain.unanswered:
                raise
            task.uncancel()
            await drain.error.response(scope)(scope, receive, closing(send))
        finally:
            drain.leave(task)


def closing(send: Send) -> Send:
    """Return a `send` that adds `connection: close` to the answer."""

    def add_header(start: Message) -> None:
        start["headers"] = [*start["headers"], (b"connection", b"close")]

    return at_start(send, add_header)
