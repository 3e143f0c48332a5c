"""The outermost layers of the application: request ids, unexpected errors, and who may come in."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.api.http.errors import internal_error, unauthorized

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping", "/version"})  # all others want a key, if there are keys
BEARER = b"bearer "


class Boundary:
    """Gives every answer its x-request-id, and lets no exception out.

    Under `root_path`, paths with that prefix and without are the same: some reverse proxies strip it, some do not.
    """

    def __init__(self, app: ASGIApp, root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["root_path"] = self._root_path
        scope.setdefault("state", {})["request_id"] = request_id.decode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:  # while it was sending its request
            return
        except Exception:
            logger.exception("%s %s ended with an internal error", scope["method"], scope["path"])
            if not started:
                await internal_error().response()(scope, receive, send_with_id)


def request_id_of(connection: HTTPConnection) -> str:
    """The id that the answer to this request carries."""
    request_id: str = connection.state.request_id
    return request_id


def _request_id(scope: Scope) -> bytes:
    """The client's own, if it is one that can be sent back."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


class KeyGate:
    """Lets those pass who send one of the keys as bearer token, and everybody to the open routes.

    Digests of equal length are compared, all of them, so that the time says nothing of the keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in OPEN_ROUTES or self._knows(scope):
            await self._app(scope, receive, send)
        else:
            await unauthorized().response()(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(sent) != 1 or not sent[0].lower().startswith(BEARER):
            return False
        digest = hashlib.sha256(sent[0][len(BEARER) :].strip()).digest()
        return any([hmac.compare_digest(digest, known) for known in self._digests])  # noqa: C419 - no short cut


def route_path(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    root: str = scope["root_path"]
    return path.removeprefix(root) if path.startswith(root + "/") else path
