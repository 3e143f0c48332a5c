"""OpenAI's Responses: create, retrieve, cancel and delete them, and list their input."""

from __future__ import annotations

from starlette.requests import Request

from minisgl.server.api.answers.answer import Answer
from minisgl.server.api.http.errors import invalid
from minisgl.server.api.responses.body import ResponsesBody
from minisgl.server.api.responses.job import order_of
from minisgl.server.api.responses.objects import Response, StreamEvent
from minisgl.server.api.responses.writer import ResponsesWriter
from minisgl.server.api.routes.endpoint import Endpoint, Service

PATH = "/v1/responses"


class ResponsesRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(PATH, self.create, ("POST",), (ResponsesBody,), (Response,), (StreamEvent,), errors=(499,)),
        ]

    async def create(self, request: Request) -> Answer:
        """Answer input items, as OpenAI's Responses API does."""
        service = self._service
        body = await service.parse(request, ResponsesBody)
        if body.previous_response_id is not None:
            raise invalid(
                "previous_response_id",
                "previous_response_id needs a server that keeps responses, which --response-store FILE switches on",
            )
        order = order_of(body, [], body.input, service.limits, service.parsers, service.config.model_name)
        service.ignored_tools.log(order.use, service.parsers)
        writer = ResponsesWriter(order.begun, order.options, None, seals_thoughts=order.seals_thoughts)
        return service.answer(request, order.job, writer, stream=body.stream, names=body.own_names)
