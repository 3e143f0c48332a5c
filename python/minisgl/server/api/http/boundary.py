"""The outermost layers of the application: request ids, unexpected errors, and who may come in."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import uuid
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.api.http.errors import ApiError, internal_error, no_admin_key, too_many_bytes, unauthorized

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
DOCS_ROUTES = frozenset(
    {"/openapi.json", "/docs", "/redoc"}
    | {f"/docs/{file}" for file in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")}
)
OPEN_ROUTES = DOCS_ROUTES | {"/health", "/ready", "/ping", "/version"}  # all others want a key, if there are keys
CONTROL_ROUTES = frozenset({"/flush_cache", "/reset_prefix_cache", "/abort", "/abort_request"})
SMALL_BODY = 64 * 1024  # bytes
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


def client_of(connection: HTTPConnection) -> str:
    """Who sends a request: the number of its key, or else the address that it comes from, which nobody can make up.

    Whoever has one IPv6 address has 2**64, so those count as one. Behind a proxy all have the proxy's.
    """
    key: int | None = getattr(connection.state, "api_key", None)
    if key is not None:
        return f"key {key}"
    if connection.client is None:
        return ""
    host = connection.client.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


class KeyGate:
    """Lets those pass who send one of the keys as bearer token, and everybody to the open routes.

    With an admin key only that one opens the control routes; it opens the others too. Without `keys` these are open.
    Digests of equal length are compared, all of them, so that the time says nothing of the keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], admin_key: str | None) -> None:
        self._app = app
        self._admin = [] if admin_key is None else [_digest(admin_key.encode())]
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        path = route_path(scope)
        if self._admin and path in CONTROL_ROUTES:
            return no_admin_key() if _key_sent(self._admin, scope) is None else None
        key = _key_sent(self._digests + self._admin, scope)
        if key is not None:
            scope.setdefault("state", {})["api_key"] = key
        return unauthorized() if self._digests and path not in OPEN_ROUTES and key is None else None


def _key_sent(digests: Sequence[bytes], scope: Scope) -> int | None:
    """The number of the key that a request carries; None if it is none of these."""
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) != 1 or not sent[0].lower().startswith(BEARER):
        return None
    digest = _digest(sent[0][len(BEARER) :].strip())
    matches = [hmac.compare_digest(digest, known) for known in digests]  # all of them: no short cut
    return matches.index(True) if any(matches) else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyBudget:
    """Bounds the bytes of all bodies that are held, from their arrival until their requests are answered.

    What is within SMALL_BODY of each body is not counted: ordinary requests are served while large ones must wait.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = counted = 0

        async def receive_counted() -> Message:
            nonlocal size, counted
            message = await receive()
            size += len(message.get("body", b""))
            more = max(0, size - SMALL_BODY) - counted
            if more:
                if self._held + more > self._max_bytes:
                    raise too_many_bytes(self._max_bytes)
                self._held += more
                counted += more
            return message

        try:
            await self._app(scope, receive_counted, send)
        finally:
            self._held -= counted


def route_path(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    root: str = scope["root_path"]
    return path.removeprefix(root) if path.startswith(root + "/") else path
