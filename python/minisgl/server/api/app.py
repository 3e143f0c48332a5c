"""The routes. A handler parses, builds a job and returns its `Answer`; everything else it knows is configuration."""

from __future__ import annotations

import logging
import re
import time
import uuid

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl import __version__
from minisgl.config import ServerConfig
from minisgl.core import InvalidRequest, Limits
from minisgl.server.api.answer import Answer
from minisgl.server.api.body import B, parse_body, read_body
from minisgl.server.api.chat import ChatWriter, chat_job
from minisgl.server.api.client import EngineClient
from minisgl.server.api.completions import CompletionWriter, completion_job, echoes
from minisgl.server.api.errors import ApiError, internal_error, invalid_request, model_not_found, shutting_down
from minisgl.server.api.generate import GenerateWriter, generate_job
from minisgl.server.api.responses import ModelCard, ModelList
from minisgl.server.api.schema import ChatBody, CompletionBody, GenerateBody

logger = logging.getLogger(__name__)

SERVER_INFO_TIMEOUT = 2.0  # seconds, for the answers of all processes
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,256}")


class Api:
    """The handlers, bound to one engine."""

    def __init__(self, client: EngineClient, config: ServerConfig, limits: Limits) -> None:
        self._client = client
        self._config = config
        self._limits = limits
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/health", self.health),
            Route("/server_info", self.server_info),
            Route("/version", self.version),
        ]

    async def chat_completions(self, request: Request) -> Answer:
        body = await self._parse(request, ChatBody)
        writer = ChatWriter(self._config.model_name, include_usage=body.wants_usage())
        return Answer(self._client, chat_job(body, self._limits), writer, stream=body.stream)

    async def completions(self, request: Request) -> Answer:
        body = await self._parse(request, CompletionBody)
        job = completion_job(body, self._limits)
        writer = CompletionWriter(self._config.model_name, echoes(body, job), include_usage=body.wants_usage())
        return Answer(self._client, job, writer, stream=body.stream)

    async def generate(self, request: Request) -> Answer:
        body = await self._parse(request, GenerateBody)
        return Answer(self._client, generate_job(body, self._limits), GenerateWriter(), stream=body.stream)

    async def _parse(self, request: Request, model: type[B]) -> B:
        body = parse_body(await read_body(request, self._config.max_body_bytes), model)
        if body.model is not None and body.model != self._config.model_name:
            raise model_not_found(body.model)
        return body

    async def models(self, _request: Request) -> Response:
        return json_response(ModelList([self._card()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self._config.model_name:
            raise model_not_found(name)
        return json_response(self._card())

    def _card(self) -> ModelCard:
        config = self._config
        return ModelCard(config.model_name, self._created, config.engine.model_path, self._limits.max_seq_len)

    async def health(self, _request: Request) -> Response:
        """Whether requests are taken; asks nobody."""
        if self._client.is_shut_down:
            raise shutting_down(None)
        return json_response({"status": "ok"})

    async def server_info(self, _request: Request) -> Response:
        """What every process holds. `complete` is false if one did not answer in time."""
        processes, complete = await self._client.query_counts(SERVER_INFO_TIMEOUT)
        return json_response(
            {
                "version": __version__,
                "model": self._config.model_name,
                "limits": self._limits,
                "config": self._config,
                "complete": complete,
                "processes": {process.process: process.counts for process in processes},
            }
        )

    async def version(self, _request: Request) -> Response:
        return json_response({"version": __version__})


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


async def on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def on_invalid_request(_request: Request, error: Exception) -> Response:
    assert isinstance(error, InvalidRequest)
    return invalid_request(error).response()


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    route = f"{request.method} {request.url.path}"
    texts = {404: f"there is no route {route}", 405: f"the method is not allowed: {route}"}
    text = texts.get(error.status_code, error.detail)
    return ApiError(error.status_code, text, headers=error.headers).response()


class Boundary:
    """The outermost layer: gives every answer its x-request-id, and lets no exception out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
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


def _request_id(scope: Scope) -> bytes:
    """The client's own, if it is one that can be sent back."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return bytes(value)
    return uuid.uuid4().hex.encode()


def build_app(client: EngineClient, config: ServerConfig, limits: Limits) -> Starlette:
    """The ASGI application."""
    app = Starlette(
        routes=Api(client, config, limits).routes(),
        middleware=[Middleware(Boundary)],
        exception_handlers={
            ApiError: on_api_error,
            InvalidRequest: on_invalid_request,
            HTTPException: on_http_exception,
        },
    )
    app.router.redirect_slashes = False
    return app
