"""Who may come in: checks of a request's head, each an ApiError or None, and the layer that asks them.

Every page that somebody near the server opens can send requests to it, from inside. A page reads no answer unless CORS
says so, but a request does what it does: it generates, aborts, empties the cache. Browsers name the page's origin with
such requests (Origin, https://fetch.spec.whatwg.org/#origin-header) or at least say whether it is foreign
(Sec-Fetch-Site, https://w3c.github.io/webappsec-fetch-metadata/); other clients send neither. A page whose own name's
address changes to that of the server (DNS rebinding) counts as the server's own: only the Host header shows it.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.config import HttpConfig
from minisgl.server.api.http.errors import ApiError, foreign_host, foreign_origin, unauthorized
from minisgl.server.api.http.request_head import route_path

DOCS_ROUTES = frozenset(
    {"/openapi.json", "/docs", "/redoc"}
    | {f"/docs/{file}" for file in ("swagger-ui-bundle.js", "swagger-ui.css", "redoc.standalone.js", "favicon.png")}
)
GUIDE_ROUTE = "/guide/"  # and the pages below it
OPEN_ROUTES = DOCS_ROUTES | {"/", "/health", "/ready", "/ping", "/version"}  # all others want a key, if there are keys
CONTROL_ROUTES = frozenset({"/flush_cache", "/reset_prefix_cache", "/abort", "/abort_request"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
GET_ROUTES_THAT_ACT = frozenset({"/flush_cache", "/health_generate"})
OWN_SITES = ("same-origin", "none")  # none: a person typed the address
BEARER = b"bearer "
ANY_KEY = "the server needs one of its keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
ADMIN_KEY = "this route needs the key of --admin-api-key, as `Authorization: Bearer KEY`"

Check = Callable[[Scope], ApiError | None]


class Gate:
    """Answers a request with the first error that one of its checks returns."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = next(filter(None, (check(scope) for check in self._checks)), None)
        app = self._app if error is None else error.response(scope)
        await app(scope, receive, send)


def browser_check(host: str, http: HttpConfig) -> Check:
    """Refuse what a foreign web page asks for, unless its origin is allowed, and foreign names of the server.

    Hosts are checked if the server listens on a loopback address (`host`), or if `allowed_hosts` names some. An address
    as a host is always right: no name stands for it.
    """
    origins = frozenset(http.allowed_origins)
    names = {name.lower() for name in http.allowed_hosts}
    checks_hosts = bool(names or _is_loopback(host)) and "*" not in names
    hosts = names | {"localhost", host.lower()} if checks_hosts else None

    def check(scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").strip()  # only HTTP/1.0, which no browser speaks, may leave it out
        if host and hosts is not None and not _is_address(name := _host_name(host)) and name not in hosts:
            return foreign_host(name)
        acts = scope["method"] not in SAFE_METHODS or route_path(scope) in GET_ROUTES_THAT_ACT
        origin = headers.get("origin")
        if not acts or "*" in origins or origin in origins:
            return None
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return foreign_origin(origin)
        return None if headers.get("sec-fetch-site", "none") in OWN_SITES else foreign_origin(origin)

    return check


def key_check(http: HttpConfig) -> Check:
    """Let those pass who send one of the keys, and everybody to the open routes.

    With an admin key only that one opens the control routes; it opens the others too. Without `api_keys` these
    are open. Digests of equal length are compared, all of them, so that the time says nothing of the keys.
    """
    admin = [] if http.admin_api_key is None else [_digest(http.admin_api_key.encode())]
    keys = [_digest(key.encode()) for key in http.api_keys]

    def check(scope: Scope) -> ApiError | None:
        path = route_path(scope)
        if admin and path in CONTROL_ROUTES:
            return unauthorized(ADMIN_KEY) if _key_sent(admin, scope) is None else None
        key = _key_sent(keys + admin, scope)
        if key is not None:
            scope.setdefault("state", {})["api_key"] = key
        is_open = path in OPEN_ROUTES or path.startswith(GUIDE_ROUTE)
        return unauthorized(ANY_KEY) if keys and not is_open and key is None else None

    return check


def client_of(connection: HTTPConnection) -> str:
    """Return who sends a request: the number of its key, or else its address, which nobody can make up.

    Whoever has one IPv6 address has 2**64, so those count as one. Behind a proxy all have the proxy's.
    """
    key: int | None = getattr(connection.state, "api_key", None)
    if key is not None:
        return f"key {key}"
    if connection.client is None:
        return ""
    host = connection.client.host
    if not _is_address(host):
        return host
    address = ipaddress.ip_address(host)
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def owner_of(connection: HTTPConnection, http: HttpConfig) -> str:
    """Return who owns what a request leaves behind: a digest of its key; everybody (""), where none is wanted."""
    key: int | None = getattr(connection.state, "api_key", None)
    if key is None or not http.api_keys:
        return ""
    return _digest([*http.api_keys, http.admin_api_key or ""][key].encode()).hex()


def _key_sent(digests: Sequence[bytes], scope: Scope) -> int | None:
    """Return the number of the key that a request carries; None if it is none of these.

    OpenAI's clients send it as a bearer token, Anthropic's as x-api-key; of both, one is enough.
    """
    sent = _keys_in(scope, b"authorization", BEARER) + _keys_in(scope, b"x-api-key", b"")
    # All of them: no short cut.
    matches = [[hmac.compare_digest(_digest(key), known) for known in digests] for key in sent]
    return next((known.index(True) for known in matches if any(known)), None)


def _keys_in(scope: Scope, header: bytes, prefix: bytes) -> list[bytes]:
    """Return the key that stands in a header behind this prefix, unless there are several such headers."""
    sent = [value for name, value in scope["headers"] if name == header]
    if len(sent) != 1 or not sent[0].lower().startswith(prefix):
        return []
    return [sent[0][len(prefix) :].strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Return name or address of a Host header: without port, brackets and the dot that may end a name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
