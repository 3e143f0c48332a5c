"""The routes that generate: chat and text completions, and /generate."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request

from minisgl.server.api.answers.answer import Answer
from minisgl.server.api.answers.chat_writer import ChatChunk, ChatCompletion, ChatWriter
from minisgl.server.api.answers.completions import (
    CompletionWriter,
    Generated,
    GenerateWriter,
    TextCompletion,
    completion_job,
    generate_job,
)
from minisgl.server.api.answers.sglang import SglangAnswer, SglangWriter, generate_body, sglang_job
from minisgl.server.api.bodies.route_bodies import ChatBody, CompletionBody, GenerateBody, SglangBody
from minisgl.server.api.http.errors import ErrorBody
from minisgl.server.api.routes.endpoint import Endpoint, Routes


class GenerationRoutes(Routes):
    def endpoints(self) -> list[Endpoint]:
        chats, texts = (ChatChunk, ErrorBody), (TextCompletion, ErrorBody)
        bodies, answers = (GenerateBody, SglangBody), (Generated, SglangAnswer)
        route = partial(Endpoint.for_engine, ends_with_done=True)
        return [
            route("/v1/chat/completions", self.chat_completions, (ChatBody,), (ChatCompletion,), chats),
            route("/v1/completions", self.completions, (CompletionBody,), (TextCompletion,), texts),
            route("/generate", self.generate, bodies, answers, (*answers, ErrorBody)),
        ]

    async def chat_completions(self, request: Request) -> Answer:
        """Answer a conversation, as OpenAI does."""
        body = await self._service.parse(request, ChatBody)
        job, options = self._service.chat_job(body, body.tool_use())
        return self._service.answer(request, job, ChatWriter(options), stream=body.stream, names=body.own_names)

    async def completions(self, request: Request) -> Answer:
        """Complete one prompt or several, as OpenAI does."""
        body = await self._service.parse(request, CompletionBody)
        job = completion_job(body, self._service.limits)
        writer = CompletionWriter(self._service.config.model_name, body)
        return self._service.answer(request, job, writer, stream=body.stream, names=body.own_names)

    async def generate(self, request: Request) -> Answer:
        """Complete one prompt, in Mini-SGLang's or SGLang's form."""
        body = await self._service.parse_as(request, generate_body)
        if isinstance(body, SglangBody):
            defaults = self._service.config.sampling_defaults.fields
            answer = sglang_job(body, self._service.limits, defaults), SglangWriter(body)
            return self._service.answer(request, *answer, stream=body.stream)
        job = generate_job(body, self._service.limits)
        return self._service.answer(request, job, GenerateWriter(body), stream=body.stream, names=body.own_names)
