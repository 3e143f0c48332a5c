"""What every route knows: the engine's client, the configuration, the limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.config import ServerConfig
from minisgl.limits import Limits
from minisgl.parsers.select import Parsers
from minisgl.server.api.bodies.body import B, UnknownFields, read_body, read_fields, validate
from minisgl.server.api.http.errors import model_not_found
from minisgl.server.api.requests.client import EngineClient
from minisgl.server.api.status.heartbeat import Heartbeat


@dataclass(frozen=True, slots=True)
class Service:
    client: EngineClient
    heartbeat: Heartbeat
    config: ServerConfig
    limits: Limits
    parsers: Parsers
    created: int = field(default_factory=lambda: int(time.time()))
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)

    async def parse(self, request: Request, model: type[B]) -> B:
        """The request's body, or ApiError."""
        return self.validate(await self.fields(request), model)

    async def fields(self, request: Request) -> dict[str, Any]:
        """What the request's body says, not yet validated; ApiError if it says nothing."""
        http = self.config.http
        return read_fields(await read_body(request, http.max_body_bytes, http.receive_timeout))

    def validate(self, fields: dict[str, Any], model: type[B]) -> B:
        """The body made of these fields, or ApiError."""
        body = validate(fields, model)
        self.unknown_fields.log(fields.keys() - model.known_fields())
        if body.model is not None:
            self.check_model(body.model)
        return body

    def check_model(self, name: str) -> None:
        """ApiError if it is not one of the model's names."""
        if name not in self.config.model_names:
            raise model_not_found(name)


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
