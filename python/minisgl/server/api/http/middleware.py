"""Middleware around the application: access log, request ids and unexpected errors, and a budget of body bytes."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.api.http.errors import internal_error, too_many_bytes
from minisgl.server.api.http.request_head import speaks_anthropic

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics", "/debug/state"})  # asked often: logged as debug
NO_ANSWER = 499  # logged as the status if the client left before its answer began
MAX_PATH = 200  # characters
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
SMALL_BODY = 64 * 1024  # bytes
MAX_SMALL_BYTES = 2**30  # of the first SMALL_BODY bytes of all requests: 16,384 of them, more than run and wait


def at_start(send: Send, change: Callable[[Message], None]) -> Send:
    """Return a `send` that calls `change` with the message that starts the answer, before it sends it."""

    async def send_changed(message: Message) -> None:
        if message["type"] == "http.response.start":
            change(message)
        await send(message)

    return send_changed


class AccessLogMiddleware:
    """Logs client, method, path, status and milliseconds of each request once its answer has ended.

    It sees an answer's start and end, but none of the events that a stream writes between them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin = time.perf_counter()
        status = NO_ANSWER

        def note_status(start: Message) -> None:
            nonlocal status
            status = start["status"]

        try:
            await self._app(scope, receive, at_start(send, note_status))
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            host = scope["client"][0] if scope["client"] else "-"
            milliseconds = (time.perf_counter() - begin) * 1e3
            extra = {"request_id": scope["state"]["request_id"]}
            line = host, scope["method"], _path(scope), status, milliseconds
            logger.log(level, "%s %s %s %d %.1f ms", *line, extra=extra)


def _path(scope: Scope) -> str:
    """Return the path as it was sent, without its query, escaped and cut so that it cannot forge a log line."""
    path: str = scope["raw_path"].decode("latin-1")
    text = path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= MAX_PATH else text[:MAX_PATH] + "..."


class RequestIdMiddleware:
    """Gives every answer its x-request-id, and turns an unexpected exception into an answer that has one.

    Paths with and without the prefix `root_path` are the same: some reverse proxies strip it, some do not.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope["root_path"] = self._root_path
        scope["state"]["request_id"] = request_id.decode()
        names = (b"x-request-id", b"request-id") if speaks_anthropic(scope) else (b"x-request-id",)
        started = False

        def add_id(start: Message) -> None:
            nonlocal started
            started = True
            start["headers"] = [*start["headers"], *((name, request_id) for name in names)]

        send = at_start(send, add_id)
        try:
            await self._app(scope, receive, send)
        except ClientDisconnect:  # while it was sending its request
            return
        except Exception:
            extra = {"request_id": request_id.decode()}
            logger.exception("%s %s ended with an internal error", scope["method"], _path(scope), extra=extra)
            if not started:
                await internal_error().response(scope)(scope, receive, send)


def request_id_of(connection: HTTPConnection) -> str:
    """Return the id that the answer to this request carries."""
    request_id: str = connection.state.request_id
    return request_id


def _request_id(scope: Scope) -> bytes:
    """Return the client's own request id if it can be sent back as a header, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


class BodyBudgetMiddleware:
    """Bounds the bytes of all bodies that are held, from their arrival until their requests are answered.

    The objects that are made of a body, and what is read from the store for a request, count like its body: see
    `hold_bytes`. The first SMALL_BODY bytes of each request have a budget of their own, so that ordinary requests are
    served while large ones wait.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._small = 0  # bytes held of the first SMALL_BODY bytes of each request
        self._large = 0  # of the others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        def hold(count: int) -> None:
            nonlocal size
            small = min(size + count, SMALL_BODY) - min(size, SMALL_BODY)
            large = count - small
            if self._small + small > MAX_SMALL_BYTES:
                raise too_many_bytes(MAX_SMALL_BYTES)
            if self._large + large > self._max_bytes:
                raise too_many_bytes(self._max_bytes)
            size += count
            self._small += small
            self._large += large

        async def receive_counted() -> Message:
            message = await receive()
            hold(len(message.get("body", b"")))
            return message

        scope["state"]["hold_bytes"] = hold
        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._small -= min(size, SMALL_BODY)
            self._large -= max(0, size - SMALL_BODY)


def hold_bytes(connection: HTTPConnection, count: int) -> None:
    """Count bytes that are held for this request until it is answered; ApiError if all requests hold too many."""
    connection.state.hold_bytes(count)
