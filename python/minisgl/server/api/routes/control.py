"""What an operator does to the running server: /flush_cache and /abort."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from minisgl.core import InvalidRequest
from minisgl.message.relayed import FlushCache, Flushed
from minisgl.server.api.bodies.schema import AbortBody
from minisgl.server.api.routes.endpoint import Endpoint
from minisgl.server.api.service import Service, json_response

FLUSH_TIMEOUT = 60.0  # seconds, for a scheduler in the middle of a step


class ControlRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/flush_cache", self.flush_cache, ("GET", "POST")),
            Endpoint("/reset_prefix_cache", self.flush_cache, ("POST",)),  # vLLM's
            Endpoint("/abort", self.abort, ("POST",), (AbortBody,), (dict[str, int],)),
            Endpoint("/abort_request", self.abort, ("POST",), (AbortBody,), (dict[str, int],)),  # SGLang's
        ]

    async def flush_cache(self, _request: Request) -> Response:
        """Forget every cached prefix that no running request uses."""
        reply = await self._service.client.ask(FlushCache, FLUSH_TIMEOUT)
        assert isinstance(reply, Flushed)
        return json_response({"success": True, "pages": reply.pages})

    async def abort(self, request: Request) -> Response:
        """End requests by id (the answer's, or its x-request-id), or all; return how many there were."""
        body = await self._service.parse(request, AbortBody)
        if body.all or body.abort_all:
            return json_response({"aborted": self._service.client.abort_all()})
        ids = [*body.request_ids, *filter(None, (body.request_id, body.rid))]
        if not ids:
            raise InvalidRequest("request_id", "request_id, request_ids or all must be given")
        return json_response({"aborted": sum([self._service.client.abort(name) for name in ids])})
