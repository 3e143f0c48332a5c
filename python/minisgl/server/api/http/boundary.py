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

from minisgl.server.api.http.errors import ApiError, internal_error, no_admin_key, unauthorized

logger = logging.getLogger(__name__)

REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")
OPEN_ROUTES = frozenset({"/health", "/ready", "/ping", "/version"})  # all others want a key, if there are keys
CONTROL_ROUTES = frozenset({"/flush_cache", "/reset_prefix_cache", "/abort", "/abort_request"})
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
            return None if _sends_one_of(self._admin, scope) else no_admin_key()
        if not self._digests or path in OPEN_ROUTES or _sends_one_of(self._digests + self._admin, scope):
            return None
        return unauthorized()


def _sends_one_of(digests: Sequence[bytes], scope: Scope) -> bool:
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) != 1 or not sent[0].lower().startswith(BEARER):
        return False
    digest = _digest(sent[0][len(BEARER) :].strip())
    return any([hmac.compare_digest(digest, known) for known in digests])  # noqa: C419 - no short cut


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def route_path(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    root: str = scope["root_path"]
    return path.removeprefix(root) if path.startswith(root + "/") else path
