"""The routes that generate: chat and text completions, and /generate."""

from __future__ import annotations

import dataclasses
import logging

from starlette.requests import Request

from minisgl.parsers.parser_choice import NONE
from minisgl.server.api.answers.answer import Answer, Writer
from minisgl.server.api.answers.chat import chat_job
from minisgl.server.api.answers.chat_writer import ChatWriter
from minisgl.server.api.answers.completions import CompletionWriter, GenerateWriter, completion_job, generate_job
from minisgl.server.api.answers.objects import ChatChunk, ChatCompletion, Generated, TextCompletion
from minisgl.server.api.answers.sglang import SglangAnswer, SglangWriter, is_sglang, sglang_job
from minisgl.server.api.bodies.conversation import ToolUse
from minisgl.server.api.bodies.schema import ChatBody, CompletionBody, GenerateBody, SglangBody
from minisgl.server.api.http.gates import client_of
from minisgl.server.api.http.middleware import request_id_of
from minisgl.server.api.requests.open_request import Job
from minisgl.server.api.routes.endpoint import Endpoint, Service

logger = logging.getLogger(__name__)

GENERATION_ERRORS = (499,)


class GenerationRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._logged_ignored_tools = False

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint(
                "/v1/chat/completions",
                self.chat_completions,
                ("POST",),
                (ChatBody,),
                (ChatCompletion,),
                (ChatChunk,),
                errors=GENERATION_ERRORS,
            ),
            Endpoint(
                "/v1/completions",
                self.completions,
                ("POST",),
                (CompletionBody,),
                (TextCompletion,),
                (TextCompletion,),
                errors=GENERATION_ERRORS,
            ),
            Endpoint(
                "/generate",
                self.generate,
                ("POST",),
                (GenerateBody, SglangBody),
                (Generated, SglangAnswer),
                (Generated, SglangAnswer),
                errors=GENERATION_ERRORS,
            ),
        ]

    async def chat_completions(self, request: Request) -> Answer:
        """Answer a conversation, as OpenAI does."""
        body = await self._service.parse(request, ChatBody)
        service = self._service
        use = body.tool_use()
        self._log_if_ignored(use)
        job, options = chat_job(body, use, service.limits, service.parsers, service.config.model_name)
        return self._answer(request, job, ChatWriter(options), stream=body.stream, names=body.own_names)

    async def completions(self, request: Request) -> Answer:
        """Go on from one prompt or several, as OpenAI does."""
        body = await self._service.parse(request, CompletionBody)
        job = completion_job(body, self._service.limits)
        writer = CompletionWriter(self._service.config.model_name, body)
        return self._answer(request, job, writer, stream=body.stream, names=body.own_names)

    async def generate(self, request: Request) -> Answer:
        """Go on from one prompt, given as Mini-SGLang or as SGLang has it."""
        fields = await self._service.fields(request)
        if is_sglang(fields):
            asked = await self._service.validate(fields, SglangBody)
            defaults = self._service.config.sampling_defaults.fields
            answer = sglang_job(asked, self._service.limits, defaults), SglangWriter(asked)
            return self._answer(request, *answer, stream=asked.stream)
        body = await self._service.validate(fields, GenerateBody)
        job = generate_job(body, self._service.limits)
        return self._answer(request, job, GenerateWriter(body), stream=body.stream, names=body.own_names)

    def _log_if_ignored(self, use: ToolUse) -> None:
        """Say once that tools which the model may call are of no use to a model without a known form of calls."""
        ignored = bool(use.schemas) and not use.required and self._service.parsers.tool_calls == NONE
        if ignored and not self._logged_ignored_tools:
            self._logged_ignored_tools = True
            logger.warning(
                "tools with tool_choice auto are ignored: the model's chat template shows no known form of tool calls "
                "(--tool-call-parser names one); a call that tool_choice demands is enforced in plain JSON"
            )

    def _answer(
        self, request: Request, job: Job, writer: Writer, *, stream: bool, names: tuple[str, ...] = ()
    ) -> Answer:
        job = dataclasses.replace(job, client=client_of(request))
        return Answer(self._service.client, job, writer, stream=stream, names=(request_id_of(request), *names))
