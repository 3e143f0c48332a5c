"""The access log: one line a request."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready", "/ping", "/metrics"})  # asked every few seconds: logged as debug
NO_ANSWER = 499  # status of a request whose client left before its answer began
MAX_PATH = 200  # characters


class AccessLog:
    """Logs client, method, path, status and milliseconds of each request once its answer has ended.

    It sees an answer's start and end, but none of the events that a stream writes between them.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin = time.perf_counter()
        status = NO_ANSWER

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            level = logging.DEBUG if scope["path"] in PROBES else logging.INFO
            host = scope["client"][0] if scope["client"] else "-"
            milliseconds = (time.perf_counter() - begin) * 1e3
            logger.log(level, "%s %s %s %d %.1f ms", host, scope["method"], _path(scope), status, milliseconds)


def _path(scope: Scope) -> str:
    """Return the path as it was sent, which cannot break or forge a line: without its query, and not endless."""
    path: str = scope["raw_path"].decode("latin-1")
    text = path if path.isascii() and path.isprintable() else ascii(path)[1:-1]
    return text if len(text) <= MAX_PATH else text[:MAX_PATH] + "..."
