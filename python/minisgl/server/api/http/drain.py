"""The way out: requests that are in are answered, new ones are refused, and connections close behind their answers.

The listening socket stays open meanwhile. A load balancer learns from 503 that it must send requests elsewhere, and
clients are told when to come again; from a refused connection both would learn only that something is broken.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.api.http.errors import ApiError, shutting_down
from minisgl.server.api.http.gates import route_path

# Answered to the last, for whoever watches the drain or wants to end it sooner.
WATCHING_ROUTES = frozenset(
    {"/metrics", "/version", "/server_info", "/get_server_info", "/abort", "/abort_request"},
)


class Drain:
    """Requests that are in, and the error of those that may not come in."""

    def __init__(self) -> None:
        self.error: ApiError | None = None  # of requests that may not come in, or were not answered in time
        self.num_requests = 0  # that are in
        self._unanswered: set[asyncio.Task[None]] = set()  # whose answers have not begun
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
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif drain.error is None:
            await self._answer(scope, receive, send)
        elif route_path(scope) in WATCHING_ROUTES:
            await self._app(scope, receive, closing(send))
        else:
            await drain.error.response()(scope, receive, closing(send))

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
            await drain.error.response()(scope, receive, closing(send))
        finally:
            drain.leave(task)


def closing(send: Send) -> Send:
    """Return a `send` for an answer behind which the connection closes."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return send_closing
