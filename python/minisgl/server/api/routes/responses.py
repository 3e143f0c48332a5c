"""OpenAI's Responses: create, retrieve, cancel and delete them, and list their input."""

from __future__ import annotations

import dataclasses

from starlette.requests import Request

from minisgl.server.api.answers.answer import Answer
from minisgl.server.api.http.gates import client_of
from minisgl.server.api.http.middleware import request_id_of
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
        order = order_of(body, [], body.input, service.limits, service.parsers, service.config.model_name)
        writer = ResponsesWriter(order.begun, order.options, None, seals_thoughts=order.seals_thoughts)
        job = dataclasses.replace(order.job, client=client_of(request))
        return Answer(service.client, job, writer, stream=body.stream, names=(request_id_of(request), *body.own_names))
