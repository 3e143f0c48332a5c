"""Declaration of a route, from which its entry in the OpenAPI document is made."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.api.bodies.request_body import Body
from minisgl.server.api.http.errors import ErrorBody
from minisgl.server.api.routes.service import Service

Handler = Callable[[Request], Awaitable[Any]]  # returns a Response or another ASGI application
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path with its handler and methods; the handler's docstring is its description."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("GET",)
    bodies: tuple[type[Body], ...] = ()  # types that the request's body may have
    answers: tuple[Any, ...] = (Json,)  # types that the answer may have
    events: tuple[Any, ...] = ()  # types of a stream's events, if the body asks for a stream
    ends_with_done: bool = False  # a stream's last event is [DONE]
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()  # error statuses besides those of every route, and of every route with a body
    error: type[msgspec.Struct] = ErrorBody  # type of its errors
    documented: bool = True

    @classmethod
    def for_engine(
        cls,
        path: str,
        handler: Handler,
        bodies: tuple[type[Body], ...],
        answers: tuple[Any, ...],
        events: tuple[Any, ...] = (),
        **more: Any,
    ) -> Endpoint:
        """Return a route whose requests go to the engine, where they may be aborted (499)."""
        return cls(path, handler, ("POST",), bodies, answers, events, errors=(499,), **more)

    @property
    def summary(self) -> str:
        """First sentence of the handler's docstring."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0].partition(". ")[0].rstrip(".")


class Routes(ABC):
    """Routes of one topic."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    def endpoints(self) -> list[Endpoint]: ...


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
