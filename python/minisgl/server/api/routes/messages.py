"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.server.api.answers.answer import Answer
from minisgl.server.api.anthropic.bodies import CountTokensBody, MessagesBody
from minisgl.server.api.anthropic.chat_form import NAMES, chat_body
from minisgl.server.api.anthropic.tools import messages_tools
from minisgl.server.api.anthropic.writer import AnthropicMessage, MessagesWriter, StreamEvent, TokenCount
from minisgl.server.api.http.errors import AnthropicErrorBody
from minisgl.server.api.http.middleware import request_id_of
from minisgl.server.api.routes.endpoint import Endpoint, Routes, json_response
from minisgl.tokenizer.conversation import template_messages


class MessagesRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        error, path = AnthropicErrorBody, "/v1/messages"
        answers, events = (AnthropicMessage,), (StreamEvent, error)
        bodies, counts = (CountTokensBody,), (TokenCount,)
        return [
            Endpoint.for_engine(path, self.messages, (MessagesBody,), answers, events, error=error),
            Endpoint(f"{path}/count_tokens", self.count_tokens, ("POST",), bodies, counts, error=error),
        ]

    async def messages(self, request: Request) -> Answer:
        """Answer a conversation, as Anthropic does."""
        service = self._service
        asked = await service.parse(request, MessagesBody)
        use = messages_tools(asked.tools, asked.tool_choice)
        body = chat_body(asked, service.limits, service.config.sampling_defaults.fields)
        await asyncio.sleep(0)  # each of these calls takes long for a large body: others get their turn
        job, options = service.chat_job(body, use)
        job = msgspec.structs.replace(job.under_names(NAMES), fewer_tokens=True)
        writer = MessagesWriter(options, request_id_of(request), service.limits.max_seq_len)
        return service.answer(request, job, writer, stream=asked.stream, names=body.own_names)

    async def count_tokens(self, request: Request) -> Response:
        """Return the number of tokens of a conversation's prompt, as Anthropic does."""
        service = self._service
        asked = await service.parse(request, CountTokensBody)
        use = messages_tools(asked.tools, asked.tool_choice)
        body = chat_body(asked, service.limits, {})
        prompt = body.chat_prompt(use, template_messages(body.messages))
        return json_response(TokenCount(await service.count_tokens(prompt)))
