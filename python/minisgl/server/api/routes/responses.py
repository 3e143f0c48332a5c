"""The routes of OpenAI's Responses API: create, retrieve, cancel and delete a response, list and count its input."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.message.to_tokenizer import ChatPrompt
from minisgl.sampling_params import InvalidRequest
from minisgl.server.api.answers.large_json import encode_large
from minisgl.server.api.bodies.list_query import page_limit
from minisgl.server.api.http.connection import LargeJson
from minisgl.server.api.http.errors import ApiError, under_clients_names
from minisgl.server.api.http.gates import owner_of
from minisgl.server.api.http.middleware import hold_bytes
from minisgl.server.api.responses.body import Item, ResponsesBody
from minisgl.server.api.responses.history import History, ItemList
from minisgl.server.api.responses.job import NAMES, PreparedResponse, prepare_response, truncate_to_fit
from minisgl.server.api.responses.writer import Response, ResponsesWriter, StreamEvent
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response
from minisgl.server.api.routes.service import Service

PATH = "/v1/responses"
ONE = PATH + "/{response_id}"
MAX_PAGE = 100  # items


class DeletedResponse(msgspec.Struct, frozen=True, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class InputTokens(msgspec.Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class ResponsesRoutes(Routes):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self._open: dict[tuple[str, str], ResponsesWriter] = {}  # responses being generated, by owner and id

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint.for_engine(PATH, self.create, (ResponsesBody,), (Response,), (StreamEvent,)),
            Endpoint(f"{PATH}/input_tokens", self.input_tokens, ("POST",), (ResponsesBody,), (InputTokens,)),
            Endpoint(ONE, self.retrieve, answers=(Response,), errors=(400, 404)),
            Endpoint(ONE, self.delete, ("DELETE",), answers=(DeletedResponse,), errors=(404,)),
            Endpoint(f"{ONE}/cancel", self.cancel, ("POST",), answers=(Response,), errors=(400, 404)),
            Endpoint(f"{ONE}/input_items", self.input_items, answers=(ItemList,), errors=(400, 404)),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answer input items, as OpenAI's Responses API does."""
        service = self._service
        body = await service.parse(request, ResponsesBody)
        history = self._history(request)
        prepared, items = await self._prepared(body, history)
        keep = history.keeper(body, items)
        begun = msgspec.structs.replace(prepared.begun, store=keep is not None)
        writer = ResponsesWriter(
            begun, prepared.options, keep, prepared.namespaced, seals_reasoning=prepared.seals_reasoning
        )
        answer = service.answer(request, prepared.job, writer, stream=body.stream, names=body.own_names)
        key = (history.owner, writer.id)

        async def send_answer(scope: Scope, receive: Receive, send: Send) -> None:
            self._open[key] = writer
            try:
                await answer(scope, receive, send)
            finally:
                del self._open[key]

        return send_answer

    async def input_tokens(self, request: Request) -> HttpResponse:
        """Return the number of tokens of a response's prompt."""
        body = await self._service.parse(request, ResponsesBody)
        prepared, _ = await self._prepared(body, self._history(request))
        (prompt,) = prepared.job.prompts
        assert isinstance(prompt, ChatPrompt)
        with under_clients_names(NAMES):
            return json_response(InputTokens(await self._service.count_tokens(prompt)))

    async def retrieve(self, request: Request) -> LargeJson:
        """Return a stored response."""
        if request.query_params.get("stream", "false").lower() == "true":
            raise InvalidRequest("stream", "stream: a stored response cannot be streamed again")
        return LargeJson(await self._history(request).response(request.path_params["response_id"]))

    async def delete(self, request: Request) -> HttpResponse:
        """Delete a stored response."""
        id = request.path_params["response_id"]
        await self._history(request).delete(id)
        return json_response(DeletedResponse(id))

    async def cancel(self, request: Request) -> LargeJson:
        """Cancel a response that is being generated."""
        id, history = request.path_params["response_id"], self._history(request)
        writer = self._open.get((history.owner, id))
        if writer is not None:
            response = writer.cancel()
            self._service.client.abort(id)
            return LargeJson(await asyncio.to_thread(encode_large, response))
        await history.response(id)  # ApiError if there is none
        raise ApiError(400, f"the response {id:.80} has ended, so it cannot be cancelled", code="response_ended")

    async def input_items(self, request: Request) -> HttpResponse:
        """List the input items of a response and of those before it, newest first unless `order` is asc."""
        query = request.query_params
        limit, order = page_limit(query, MAX_PAGE), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order", f"order must be asc or desc, not {order:.20}")
        page = await self._history(request).input_items(
            request.path_params["response_id"],
            limit=limit,
            after=query.get("after"),
            descending=order == "desc",
        )
        return json_response(page)

    def _history(self, request: Request) -> History:
        owner = owner_of(request, self._service.config.http)
        return History(self._service.responses, owner, partial(hold_bytes, request))

    async def _prepared(self, body: ResponsesBody, history: History) -> tuple[PreparedResponse, list[Item]]:
        """Return the request of a body, and the body's input items with references resolved."""
        service = self._service
        earlier, items = await history.before(body), await history.resolved(body.input)
        prepared = prepare_response(body, earlier, items, service.limits, service.chat_job)
        if body.truncation == "auto":
            prepared = await self._truncated(prepared)
        return prepared, items

    async def _truncated(self, prepared: PreparedResponse) -> PreparedResponse:
        """Return the request with as many turns as the context holds, and a warning if some are left out."""
        job, left_out = await truncate_to_fit(prepared.job, self._count, self._service.limits.max_seq_len)
        if not left_out:
            return prepared
        warnings = prepared.begun.warnings or []
        text = f"truncation: the oldest {left_out} messages do not fit the context and were left out"
        begun = msgspec.structs.replace(prepared.begun, warnings=[*warnings, text])
        return dataclasses.replace(prepared, job=job, begun=begun)

    async def _count(self, prompt: ChatPrompt) -> int | None:
        """Return a prompt's number of tokens; None if the tokenizer refuses it, for instance as too long."""
        try:
            return await self._service.count_tokens(prompt)
        except InvalidRequest:
            return None
