"""Access checks on a request's head, each returning an ApiError or None, and the middleware that runs them.

Any web page that is open in a browser on the server's network can send requests to the server. Without CORS the page
cannot read the answers, but the requests still take effect: they generate, abort, empty the cache. Browsers send the
page's origin with such requests (Origin, https://fetch.spec.whatwg.org/#origin-header) or at least whether it is
another site (Sec-Fetch-Site, https://w3c.github.io/webappsec-fetch-metadata/); other clients send neither. With DNS
rebinding, a page changes the address of its own name to the server's, and browsers take it for the server's own page:
only the Host header shows it.
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
OPEN_ROUTES = DOCS_ROUTES | {"/", "/health", "/ready", "/ping", "/version"}  # need no key
CONTROL_ROUTES = frozenset({"/flush_cache", "/reset_prefix_cache", "/abort", "/abort_request"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
GET_ROUTES_THAT_ACT = frozenset({"/flush_cache", "/health_generate"})
OWN_SITES = ("same-origin", "none")  # none: a person typed the address
BEARER = b"bearer "
ANY_KEY = "the server needs one of its keys, as `Authorization: Bearer KEY` or `x-api-key: KEY`"
ADMIN_KEY = "this route needs the key of --admin-api-key, as `Authorization: Bearer KEY` or `x-api-key: KEY`"

Check = Callable[[Scope], ApiError | None]


class Gate:
    """Middleware that answers a request with the first error that one of its checks returns."""

    def __init__(self, app: ASGIApp, checks: Sequence[Check]) -> None:
        self._app = app
        self._checks = checks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = next(filter(None, (check(scope) for check in self._checks)), None)
        app = self._app if error is None else error.response(scope)
        await app(scope, receive, send)


def browser_check(host: str | None, http: HttpConfig) -> Check:
    """Return the check that refuses requests of other sites' pages, and unknown host names of the server.

    Host names are checked if the server listens on a loopback address (`host`; None: on a Unix domain socket, which no
    page can reach), or if `allowed_hosts` names some. A Host header that is an IP address always passes, because DNS
    rebinding needs a name.
    """
    origins = frozenset(http.allowed_origins)
    names = {name.lower() for name in http.allowed_hosts}
    checks_hosts = bool(names or (host is not None and _is_loopback(host))) and "*" not in names
    hosts = names | {"localhost", (host or "localhost").lower()} if checks_hosts else None

    def check(scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").strip()  # only HTTP/1.0, which no browser speaks, may leave it out
        if host and hosts is not None and _address(name := _host_name(host)) is None and name not in hosts:
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
    """Return the check that a request carries one of the keys; OPEN_ROUTES need none.

    If there is an admin key, control routes accept that one alone, and other routes accept it too. If there are no
    `api_keys`, other routes need no key. Every digest is compared, in constant time, so that timing tells nothing of
    the keys.
    """
    admin = [] if http.admin_api_key is None else [_digest(http.admin_api_key.encode())]
    keys = [_digest(key.encode()) for key in http.api_keys]

    def check(scope: Scope) -> ApiError | None:
        path = route_path(scope)
        if admin and path in CONTROL_ROUTES:
            return unauthorized(ADMIN_KEY) if _key_sent(admin, scope) is None else None
        key = _key_sent(keys + admin, scope)
        if key is not None:
            scope["state"]["api_key"] = key
        is_open = path in OPEN_ROUTES or path.startswith(GUIDE_ROUTE)
        return unauthorized(ANY_KEY) if keys and not is_open and key is None else None

    return check


def client_of(connection: HTTPConnection) -> str:
    """Return the sender of a request: the number of its API key, or else its address, which it cannot forge.

    The 2**64 addresses of an IPv6 network count as one sender. Behind a proxy all senders have the proxy's address.
    """
    key: int | None = getattr(connection.state, "api_key", None)
    if key is not None:
        return f"key {key}"
    if connection.client is None:
        return ""
    address = _address(connection.client.host)
    if address is None:
        return connection.client.host
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def owner_of(connection: HTTPConnection, http: HttpConfig) -> str:
    """Return the owner of stored data: a digest of the request's key, or "" for everybody if there are no keys."""
    key: int | None = getattr(connection.state, "api_key", None)
    if key is None or not http.api_keys:
        return ""
    return _digest([*http.api_keys, http.admin_api_key or ""][key].encode()).hex()


def _key_sent(digests: Sequence[bytes], scope: Scope) -> int | None:
    """Return the index of the key that a request carries; None if it carries none of these.

    OpenAI's clients send it as a bearer token, Anthropic's as x-api-key; if both are sent, one right key is enough.
    """
    sent = _keys_in(scope, b"authorization", BEARER) + _keys_in(scope, b"x-api-key", b"")
    # Every key is compared with every digest: stopping early would leak timing.
    matches = [[hmac.compare_digest(_digest(key), known) for known in digests] for key in sent]
    return next((known.index(True) for known in matches if any(known)), None)


def _keys_in(scope: Scope, header: bytes, prefix: bytes) -> list[bytes]:
    """Return the key in a header, after the prefix, as a list of one; [] if the header is absent or repeated."""
    sent = [value for name, value in scope["headers"] if name == header]
    if len(sent) != 1 or not sent[0].lower().startswith(prefix):
        return []
    return [sent[0][len(prefix) :].strip()]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """Return name or address of a Host header: without port, brackets and the dot that may end a name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
