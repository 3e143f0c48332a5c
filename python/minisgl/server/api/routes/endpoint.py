"""A route and what the OpenAPI document says of it, in one declaration."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from minisgl.server.api.bodies.schema import Body

Handler = Callable[[Request], Awaitable[Any]]  # of a Response or another ASGI application
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path, its handler and its methods; the handler's docstring describes it."""

    path: str
    handler: Handler
    methods: tuple[str, ...] = ("GET",)
    bodies: tuple[type[Body], ...] = ()  # types of which a request's body is one
    answers: tuple[Any, ...] = (Json,)  # types of which the answer is one
    events: tuple[Any, ...] = ()  # types of a stream's events, if the body asks for a stream
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()  # statuses besides those that every route, or every one with a body, may answer
    documented: bool = True

    @property
    def summary(self) -> str:
        """First sentence of the handler's docstring."""
        return (inspect.getdoc(self.handler) or "").partition("\n")[0].partition(". ")[0].rstrip(".")


class Topic(Protocol):
    """A module's routes."""

    def endpoints(self) -> list[Endpoint]: ...
