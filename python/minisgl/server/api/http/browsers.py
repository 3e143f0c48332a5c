"""Limits on web pages. Every page that somebody near the server opens can send requests to it, from inside.

A page reads no answer unless CORS says so, but a request does what it does: it generates, aborts, empties the cache.
Browsers name the page's origin with such requests (Origin, https://fetch.spec.whatwg.org/#origin-header) or at least
say whether it is foreign (Sec-Fetch-Site, https://w3c.github.io/webappsec-fetch-metadata/); other clients send neither.
A page whose own name's address changes to that of the server (DNS rebinding) counts as the server's own: only the Host
header shows it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.api.http.boundary import route_path
from minisgl.server.api.http.errors import ApiError, foreign_host, foreign_origin

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
GET_ROUTES_THAT_ACT = frozenset({"/flush_cache", "/health_generate"})
OWN_SITES = ("same-origin", "none")  # none: a person typed the address


class BrowserGate:
    """Refuses what a foreign web page asks for, unless its origin is allowed, and foreign names of the server.

    Hosts are checked if the server listens on a loopback address, or if `allowed_hosts` names some. An address as a
    host is always right: no name stands for it.
    """

    def __init__(
        self, app: ASGIApp, *, host: str, allowed_hosts: Sequence[str], allowed_origins: Sequence[str]
    ) -> None:
        """`host` is the one that the server listens on."""
        self._app = app
        self._origins = frozenset(allowed_origins)
        names = {name.lower() for name in allowed_hosts}
        checks_hosts = bool(names or _is_loopback(host)) and "*" not in names
        self._hosts = names | {"localhost", host.lower()} if checks_hosts else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._error(scope) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").strip()  # only HTTP/1.0, which no browser speaks, may leave it out
        if host and self._hosts is not None and not _is_address(name := _host_name(host)) and name not in self._hosts:
            return foreign_host(name)
        acts = scope["method"] not in SAFE_METHODS or route_path(scope) in GET_ROUTES_THAT_ACT
        origin = headers.get("origin")
        if not acts or "*" in self._origins or origin in self._origins:
            return None
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return foreign_origin(origin)
        if headers.get("sec-fetch-site", "none") not in OWN_SITES:
            return foreign_origin(origin)
        return None


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """Name or address in a Host header: without port, brackets and the dot that may end a name."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()
