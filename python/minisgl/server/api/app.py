"""The ASGI application: the routes, the middleware around them, and the answers to exceptions."""

from __future__ import annotations

from functools import cache
from itertools import chain

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from minisgl.config import ServerConfig
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.http.drain import DrainGate, DrainState
from minisgl.server.api.http.errors import ApiError, invalid_request
from minisgl.server.api.http.gates import Gate, browser_check, key_check
from minisgl.server.api.http.middleware import AccessLogMiddleware, BodyBudgetMiddleware, RequestIdMiddleware
from minisgl.server.api.openapi import openapi_document
from minisgl.server.api.routes.docs import DocsRoutes
from minisgl.server.api.routes.endpoint import Routes
from minisgl.server.api.routes.generation import GenerationRoutes
from minisgl.server.api.routes.glass_box import GlassBoxRoutes
from minisgl.server.api.routes.loads import LoadRoutes
from minisgl.server.api.routes.messages import MessagesRoutes
from minisgl.server.api.routes.models import ModelRoutes, TokenRoutes
from minisgl.server.api.routes.operations import ControlRoutes, StatusRoutes
from minisgl.server.api.routes.pooling import PoolingRoutes
from minisgl.server.api.routes.responses import ResponsesRoutes
from minisgl.server.api.routes.service import Service

TOPICS: dict[str, type[Routes]] = {
    "generation": GenerationRoutes,
    "pooling": PoolingRoutes,
    "responses": ResponsesRoutes,
    "messages": MessagesRoutes,
    "models": ModelRoutes,
    "tokens": TokenRoutes,
    "status": StatusRoutes,
    "loads": LoadRoutes,
    "glass box": GlassBoxRoutes,
    "control": ControlRoutes,
}
LARGEST_BODIES = 128  # bodies of the largest allowed size that may be held at a time: 1 GiB by default


def build_app(service: Service, drain: DrainState) -> FastAPI:
    """Return the application of all endpoints, by topic, with the document that is made from them.

    They enter as plain Starlette routes: FastAPI's own cost twice the time a request, and read bodies before the limits
    of `bodies.read_body` are checked.
    """
    topics = {name: topic(service).endpoints() for name, topic in TOPICS.items()}
    app = FastAPI(
        openapi_url=None,
        redirect_slashes=False,
        middleware=middleware_stack(service.config, drain),
        exception_handlers=dict.fromkeys((ApiError, InvalidRequest, HTTPException), on_error),
    )
    app.openapi = cache(lambda: openapi_document(topics, service.config, service.limits))  # type: ignore[method-assign]
    for one in (*chain.from_iterable(topics.values()), *DocsRoutes(app.openapi).endpoints()):
        app.add_route(one.path, one.handler, list(one.methods))
    return app


def middleware_stack(config: ServerConfig, drain: DrainState) -> list[Middleware]:
    """Return the middleware, outermost first.

    CORS comes before the gate: a web page's preflight carries no key, and the page must be able to read a refusal.
    """
    http = config.http
    found = [Middleware(RequestIdMiddleware, root_path=http.root_path)]
    if config.access_log and not config.shell:  # the shell has the terminal
        found.insert(0, Middleware(AccessLogMiddleware))
    if http.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=http.allowed_origins,
            allow_methods=http.allowed_methods,
            allow_headers=http.allowed_headers,
            allow_credentials=http.allow_credentials,
            expose_headers=["x-request-id", "request-id", "retry-after", "x-should-retry"],
        )
        found.append(cors)
    found.append(Middleware(DrainGate, drain=drain))
    host = config.host if config.uds is None else None
    found.append(Middleware(Gate, checks=(browser_check(host, http), key_check(http))))
    found.append(Middleware(BodyBudgetMiddleware, max_bytes=LARGEST_BODIES * http.max_body_bytes))
    return found


async def on_error(request: Request, error: Exception) -> Response:
    """Answer an error in the form that the client reads."""
    match error:
        case InvalidRequest():
            error = invalid_request(error)
        case HTTPException():
            error = _http_error(request, error)
    assert isinstance(error, ApiError)
    return error.response(request.scope)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """Return the form of Starlette's own errors: unknown routes and methods."""
    route = f"{request.method} {request.url.path}"
    texts = {404: f"there is no route {route}", 405: f"the method is not allowed: {route}"}
    text = texts.get(error.status_code, error.detail)
    headers = {"allow": _allowed_methods(request)} if error.status_code == 405 else error.headers
    return ApiError(error.status_code, text, headers=headers)


def _allowed_methods(request: Request) -> str:
    """Return the methods of all routes of a request's path; Starlette names those of the first one."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))
